"""Plays workers, a pool and a broker in virtual time, and checks what happens to every message.

The workers decide with the machine of `umbel.worker.delivery`; everything around it is a model.
`umbel sim --what deliveries --seed N` prints a play.
"""
