"""One task over many items: inside one call (`xmap`, `xstarmap`) or in portions (`chunks`).

`xmap` and `xstarmap` are one message each: the worker runs the task for every item, one after
the other, and returns the list. `chunks` cuts the items into portions of `n` and sends one
`xstarmap` per portion, as a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from umbel.app.canvas.group import group
from umbel.app.canvas.signature import Signature, signature

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel


class xmap(Signature):  # noqa: N801 - the name in callers' code
    """`[task(item) for item in it]` in one call."""

    task_name = "celery.map"

    def __init__(
        self, task: Any, it: Iterable[Any] = (), *, app: Umbel | None = None, **options: Any
    ) -> None:
        inner = signature(task, app=app)
        super().__init__(
            self.task_name,
            (),
            {"task": inner, "it": list(it)},
            options,
            immutable=True,
            app=app or inner.known_app(),
        )

    @classmethod
    def from_wire(cls, data: dict[str, Any], app: Umbel | None) -> Signature:
        """A copy of a map is a plain signature of the same content."""
        return Signature(data, app=app)

    def __repr__(self) -> str:
        return f"{self.task}({self.kwargs['task'].task}, {len(self.kwargs['it'])} items)"


class xstarmap(xmap):  # noqa: N801 - the name in callers' code
    """`[task(*item) for item in it]` in one call."""

    task_name = "celery.starmap"


class chunks(Signature):  # noqa: N801 - the name in callers' code
    """Items in portions of `n`, one `xstarmap` call for each."""

    def __init__(
        self,
        task: Any,
        it: Iterable[Any] = (),
        n: int = 1,
        *,
        app: Umbel | None = None,
        **options: Any,
    ) -> None:
        if n < 1:
            raise ValueError(f"chunks of {n} items: give a size of at least 1")
        inner = signature(task, app=app)
        super().__init__(
            "celery.chunks",
            (),
            {"task": inner, "it": list(it), "n": n},
            options,
            immutable=True,
            app=app or inner.known_app(),
        )

    @classmethod
    def from_wire(cls, data: dict[str, Any], app: Umbel | None) -> chunks:
        """Read the portions' task, items and size."""
        kwargs = data["kwargs"]
        made = cls(kwargs["task"], kwargs["it"], kwargs["n"], app=app)
        made["options"] = data.get("options") or {}
        return made

    def __call__(self, **options: Any) -> Any:
        """Send the portions."""
        return self.apply_async(**options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send one message per portion; gives a `GroupResult` of lists."""
        return self.group().apply_async(args, kwargs, **options)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run the portions inline."""
        return self.group().apply(args, kwargs, **options)

    def group(self) -> group:
        """The portions as a group."""
        items = iter(self.kwargs["it"])
        portions = iter(lambda: list(islice(items, self.kwargs["n"])), [])
        inner, options = self.kwargs["task"], self.options
        return group(
            [xstarmap(inner, portion, app=self._app, **options) for portion in portions],
            app=self._app,
        )
