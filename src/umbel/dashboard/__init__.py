"""The web view of a cluster: live from its events, and its history from the pipeline's tables.

    live/       one thread that hears events and folds them; one that asks nodes and queues
    pages/      what each page tells, as plain data: HTML, the JSON API and live updates share it
    search      the language of the search field
    guard       what stands before every request: host, origin, session, headers
    gate        the one door to whatever changes something: permission, preview, audit log
    stream      live updates: server-sent events with the fragments of a page that changed
    site        the parts put together as an ASGI application

Everything shown comes from whoever can reach the broker, so nothing of it is trusted: templates
escape, `texts.shown` bounds and cleans, and no script or style but our own files may run.

Whoever can connect may look; who changes something must have logged in. Without a password or a
trusted proxy nothing can be changed, and only loopback addresses are served.
"""
