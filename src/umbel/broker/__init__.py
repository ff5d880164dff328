"""What touches a broker.

- `sessions`   connections: addresses, opening and holding them, the name of a node
- `tasks`      task messages: their layout, publishing them, the channel that brings them
- `broadcast`  events, control messages and replies: who listens, and how
- `registers`  write-once registers
- `embedded`   the private server of an application without a configured broker
- `redis`, `amqp`  transports of our own

Nothing here knows tasks: this layer moves messages and says clearly when it cannot.
"""
