"""What a cluster decides, as pure state machines and tables.

Nothing here has a clock, a thread, a socket or dice of its own: time comes in as an argument,
effects come out as values, and whoever calls carries them out. So the same code runs in a
worker, in a simulation and, as tables, in the pipeline.
"""
