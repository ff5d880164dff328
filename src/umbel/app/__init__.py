"""What a client holds: the application, its tasks, signatures, results and settings.

Nothing here consumes task messages; that is `umbel.worker`. The path of a call is
`Task.apply_async` -> `app.calls` (options become a message) -> `app.routes` (where to) ->
`app.publish` (out).
"""
