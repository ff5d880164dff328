"""What touches a broker: connections, addresses, and the embedded server.

`connections` makes connections through kombu, whatever the transport; `session` opens them, and
holds one after another for those who need the broker all the time. `embedded` keeps a
private server for the working directory, which is what an application without a configured
broker talks to; `embedded_program` chooses the program that serves, and `embedded_keeper` is the
small process that minds it.

Nothing here knows tasks: this layer moves messages and says clearly when it cannot.
"""
