"""What a worker has taken from the broker, from receipt until it is settled: decisions only.

Nothing in this package reads a clock, starts a thread, opens a socket or logs. `machine.Deliveries`
decides, `effects.Effects` is what it asks of its surroundings, and `states` has the table of all
transitions. `worker.runtime.delivery_driver` carries effects out; the simulator plays the same
machine against models of Redis, RabbitMQ and a pool (`umbel sim --what deliveries`).
"""
