"""`umbel top`: the cluster live on a terminal.

`figures` turns events into numbers and knows no terminal; `tables` says which of them are shown,
in which order; `screen` is the Textual application; `command` is the verb.
"""
