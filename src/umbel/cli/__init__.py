"""The command line: one file per verb.

`main` is the entry: it patches the process where the pool needs that, runs the verb inside the
one error barrier (`errors`) and turns what comes out into an exit code. `group` knows the verbs
and imports each only when it is used; `apps` finds the application that `-A` names.
"""
