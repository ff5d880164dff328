"""The tasks that every worker knows, under the names that are on the wire.

`celery.map`, `celery.starmap` and `celery.chunks` are called as such. `celery.group` and
`celery.chord` are what a signature of that kind becomes when somebody sends it as a plain
task. `celery.chord_unlock` is how clients with a backend that cannot count parts wait for a
chord. `celery.accumulate` gathers what a replaced task's group returns. A chain is never a
task: its steps travel with its first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbel.exceptions import ChordError, UmbelError

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel


def register_builtins(app: Umbel) -> None:
    """Register all built-in tasks with an application."""
    _register_maps(app)
    _register_composites(app)
    _register_chord_unlock(app)

    @app.task(name="celery.accumulate", typing=False)
    def accumulate(*args: Any, **kwargs: Any) -> Any:
        index = kwargs.get("index")
        return args[index] if index is not None else args

    @app.task(name="celery.backend_cleanup", ignore_result=True)
    def backend_cleanup() -> None:
        app.backend.cleanup()


def _register_maps(app: Umbel) -> None:
    from umbel.app.canvas import chunks, signature

    @app.task(name="celery.map")
    def xmap(task: Any, it: Any) -> list[Any]:
        run = signature(task, app=app).type
        return [run(item) for item in it]

    @app.task(name="celery.starmap")
    def xstarmap(task: Any, it: Any) -> list[Any]:
        run = signature(task, app=app).type
        return [run(*item) for item in it]

    @app.task(name="celery.chunks")
    def xchunks(task: Any, it: Any, n: int) -> Any:
        return chunks(signature(task, app=app), it, n, app=app).apply_async()


def _register_composites(app: Umbel) -> None:
    from umbel.app.canvas import chord, group, signature

    @app.task(name="celery.chain")
    def xchain(*_: Any, **__: Any) -> None:
        raise UmbelError("a chain is not a task: send its first step with the rest as its chain")

    @app.task(name="celery.group", typing=False)
    def xgroup(
        tasks: Any, result: Any = None, group_id: str | None = None, partial_args: Any = (),
        add_to_parent: bool = True, **_: Any,
    ) -> Any:  # fmt: skip
        members = [signature(one, app=app) for one in tasks]
        options = {"task_id": group_id} if group_id else {}
        return group(members, app=app).apply_async(
            tuple(partial_args or ()), add_to_parent=add_to_parent, **options
        )

    @app.task(name="celery.chord", typing=False)
    def xchord(header: Any, body: Any, partial_args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        made = chord(header, signature(body, app=app), app=app)
        return made.apply_async(tuple(partial_args or ()), dict(kwargs or {}))


def _register_chord_unlock(app: Umbel) -> None:
    from umbel.app.canvas import signature
    from umbel.app.duties import fail_signature
    from umbel.app.results import GroupResult, result_from_tuple

    @app.task(
        name="celery.chord_unlock", bind=True, ignore_result=True, max_retries=None,
        default_retry_delay=1.0, typing=False,
    )  # fmt: skip
    def unlock_chord(
        self: Any, group_id: str, callback: Any, interval: float | None = None,
        max_retries: int | None = None, result: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        body = signature(callback, app=app)
        parts = GroupResult(group_id, [result_from_tuple(one, app) for one in result or ()], app)
        if not parts.ready():
            raise self.retry(
                countdown=self.default_retry_delay if interval is None else interval,
                max_retries=max_retries,
            )
        for part in parts._leaves():
            if not part.successful():
                error = ChordError(f"Dependency {part.id} raised {part.result!r}")
                fail_signature(app, body, error, errbacks=True)
                return
        body.apply_async((parts._values(),))
