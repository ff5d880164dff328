"""Results: handles on what tasks return, and the backends that keep it.

`AsyncResult` and `GroupResult` are cheap handles: an id and an application. A `Backend` keeps
the documents. Waiting is push: a backend tells its watchers when a task has ended, on a thread
of its own, and nobody asks again and again.
"""

from __future__ import annotations

from umbel.app.results.async_result import AsyncResult, allow_join_result
from umbel.app.results.eager_result import EagerResult
from umbel.app.results.group_result import GroupResult
from umbel.app.results.tuples import result_from_tuple

__all__ = ["AsyncResult", "EagerResult", "GroupResult", "allow_join_result", "result_from_tuple"]
