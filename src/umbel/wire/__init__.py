"""What crosses the wire: task messages, events, control messages and results, as typed values.

Everything here is a pure function of its arguments: bytes and headers in, values out, and the
other way round. There is no clock, socket, thread, logger or randomness; whoever calls does
the I/O and says what time it is.

- `limits`       the caps on what we read, and `Refusal`, the one error that reading raises
- `content`      json, msgpack and yaml, and which of them are accepted; pickle never is
- `compression`  the methods of the `compression` header, with a bound on what comes out
- `tasks`        task messages, read: protocol 2, protocol 1, and the mixture of both
- `outgoing`     task messages, written
- `signatures`   the dictionaries that describe a call inside callbacks, chains and chords
- `results`      the document stored for a task, and the parts of a chord
- `failures`     exceptions as stored results, and back, without importing anything
- `events`       what nodes tell of themselves and of tasks
- `control`      requests to nodes and their replies
- `signing`      commands, replies and events that only the owners of the key can write
- `patterns`     which nodes a pattern means, in bounded time
- `redaction`    what of a task's arguments, results and errors may be shown
- `secret_texts` secrets inside of texts that somebody else has written
- `masking`      what of settings and addresses may be shown
- `times`        ISO-8601 times that can be represented
- `reprs`        short texts of arguments and results, bounded whatever the value is

Two rules hold throughout. No input, however broken or hostile, makes a reader raise anything
but `Refusal` (or `SecurityError` for a stored failure that names something that is not an
exception); and no reader imports a module or runs code because a message asked for it.
"""
