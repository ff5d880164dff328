"""A whole cluster in one process: virtual time, a broker that misbehaves, and checks.

The nodes are made of the very machine that decides in workers (`umbel.cluster.node`): membership,
own stalls and deafness, elections, refusals, mingle, revocations, pauses of queues, the pace of
heartbeats. What is around it is modelled:

- `world`      time, the order of events, dice, and a hash over everything that happens
- `brokers`    Redis pub/sub and AMQP queues, each with what it promises and what it does not
- `registers`  the write-once register that decides elections
- `nodes`      the threads, clocks and connection of one worker
- `faults`     what goes wrong, and when it stops
- `checks`     what must hold at every step, and what must be true again after a time of calm
- `plays`      one seed: a cluster, some elections and revocations, some faults, then calm
- `runs`       many seeds
- `mutations`  versions of a node with one thing taken out, which the checks must find
- `deliveries` the same for what workers do with messages, with `umbel.worker.delivery`
- `games`      both, for the command

A *play* is a function of its seed: the same seed gives the same steps and the same hash, on every
machine and with every hash seed of Python. Nothing sleeps and nothing is random but the dice.

What must hold (see `checks`):

| always                                 | after a calm of 9 s at most, or longer where nodes   |
|                                        | beat slowly                                          |
| -------------------------------------- | ---------------------------------------------------- |
| at most one action per election        | one action per election that a living node has heard |
| all who know a winner know the same    |   of, unless its winner died between claim and       |
| a node stands once for an election     |   action, and no election is open any more           |
| clocks grow and stay finite            | everybody knows who is there, and nobody else        |
| tables stay within their bounds        | everybody has the same revocations                   |
| who could not hear marks no node as    | everybody knows the same queues to be paused         |
|   lost that was there all the time     |                                                      |
"""
