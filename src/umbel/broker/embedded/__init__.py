"""The embedded broker: a private server for one directory, its program, and its keeper."""
