"""What touches a broker: connections, addresses, and the embedded Redis server.

`connections` opens connections through kombu, whatever the transport. `embedded` keeps a
private Redis server for the working directory, which is what an application without a
configured broker talks to; `embedded_keeper` is the small process that minds that server.

Nothing here knows tasks: this layer moves messages and says clearly when it cannot.
"""
