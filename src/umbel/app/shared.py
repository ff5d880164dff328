"""`@shared_task`: a task of a library that does not know its application yet.

The decorated name is a stand-in. Every use goes to the task of the same name in the
application that is current at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from umbel.app.current import current_app, share

if TYPE_CHECKING:
    from umbel.app.task import Task
    from umbel.app.umbel import Umbel


class SharedTask:
    """Stands for the task `name` of whichever application is current."""

    def __init__(self, name: str, fun: Callable[..., Any]) -> None:
        self.__dict__["name"] = name
        self.__dict__["__wrapped__"] = fun
        self.__dict__["__doc__"] = fun.__doc__

    def _task(self) -> Task:
        return current_app().tasks[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._task()(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "name" or (attribute.startswith("__") and attribute.endswith("__")):
            # Python's own questions, such as those of copy and pickle, are about the stand-in.
            raise AttributeError(attribute)
        return getattr(self._task(), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(self._task(), attribute, value)

    def __repr__(self) -> str:
        return f"<shared task {self.name}>"


def shared_task(*args: Any, **options: Any) -> Any:
    """Register a function as a task of every application, present and future."""

    def decorate(fun: Callable[..., Any]) -> SharedTask:
        name = options.get("name") or f"{fun.__module__}.{fun.__name__}"
        chosen = {**options, "name": name}

        def register(app: Umbel) -> object:
            return app.task(fun, **chosen)

        share(register)
        return SharedTask(name, fun)

    if len(args) == 1 and callable(args[0]) and not options:
        return decorate(args[0])
    if args:
        raise TypeError("shared_task takes keyword options only, such as @shared_task(bind=True)")
    return decorate
