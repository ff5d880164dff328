"""One event as one line: time, clock, node, type, task id, name, details.

Columns grow with what they have to hold, up to a bound, and never shrink again, so lines stay
aligned without wasting room. The details get what is left of the terminal. No field is trusted to
be of the kind it should be; what is not is shown as it is, or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from umbel.cli.plain import ELLIPSIS, number, plain, seconds
from umbel.wire.events import Event

# Of a line that goes to a file or a pipe.
DETAIL_CHARS_MAX = 200
ID_CHARS = 8
UNKNOWN_TIME = "--:--:--.---"

STYLES = {
    "task-sent": "dim",
    "task-received": "blue",
    "task-started": "cyan",
    "task-succeeded": "green",
    "task-failed": "bold red",
    "task-retried": "yellow",
    "task-revoked": "magenta",
    "task-rejected": "red",
    "task-cancelled": "magenta",
    "worker-online": "bold green",
    "worker-offline": "bold yellow",
    "worker-heartbeat": "dim",
}
# What every event has, and what the columns and other events show already.
_COMMON = frozenset(
    {"type", "hostname", "timestamp", "clock", "pid", "utcoffset", "seq", "inc", "sync", "uuid"}
    | {"name", "local_received", "root_id", "parent_id", "traceback", "umbel_series"}
)


class Lines:
    """Makes lines of events for a terminal of some width, or for a file (no width)."""

    def __init__(self, width: int | None = None) -> None:
        self.width = width
        narrow = width is not None and width < 110
        self._clock = _Column(4, 16, right=True)
        self._node = _Column(8, 18 if narrow else 28)
        self._type = _Column(16, 24)
        self._name = _Column(8, 22 if narrow else 36)

    def line(self, event: Event, name: Any = None, waited_s: float | None = None) -> Text:
        """The line of an event; `name` and `waited_s` are what is known from earlier ones."""
        kind = event["type"]
        style = STYLES.get(kind, "")
        uuid = plain(event.get("uuid"), 64)
        line = Text(no_wrap=True, end="")
        line.append(local_time(event["timestamp"]), "dim")
        line.append("  " + self._clock.fit(plain(event.get("clock"), 16)), "dim")
        line.append("  " + self._node.fit(plain(event["hostname"], 64)))
        line.append("  " + self._type.fit(plain(kind, 64)), style)
        line.append("  " + uuid[:ID_CHARS].ljust(ID_CHARS), "dim")
        line.append("  " + self._name.fit(plain(event.get("name") or name, 64)), "bold")
        details = plain(
            " ".join(word for word in _details(event, waited_s) if word),
            DETAIL_CHARS_MAX if self.width is None else max(self.width, 1),
        )
        line.append("  " + details, style if kind in _TELLING else "")
        line.rstrip()
        if self.width is not None:
            line.truncate(self.width, overflow="ellipsis")
        return line


class _Column:
    def __init__(self, width: int, width_max: int, *, right: bool = False) -> None:
        self._width, self._width_max, self._right = width, width_max, right

    def fit(self, text: str) -> str:
        needed = cell_len(text)
        if needed > self._width:
            self._width = min(needed, self._width_max)
        if needed > self._width:
            return set_cell_size(text, self._width - 1) + ELLIPSIS
        room = " " * (self._width - needed)
        return room + text if self._right else text + room


def local_time(timestamp: float) -> str:
    """Hours to milliseconds, where this program runs."""
    try:
        moment = datetime.fromtimestamp(timestamp, UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return UNKNOWN_TIME
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"


def _details(event: Event, waited_s: float | None) -> Iterator[str]:
    """The details as words."""
    maker = _DETAILS.get(event["type"])
    if maker is not None:
        yield from maker(event)
    else:
        for field, value in event.items():
            if field not in _COMMON:
                yield f"{plain(field, 32)}={plain(value, 64)}"
    if waited_s is not None and event["type"] == "task-started":
        yield f"waited {seconds(waited_s)}"


def _call(event: Event) -> Iterator[str]:
    yield call_text(event)
    if event.get("queue"):
        yield f"queue={plain(event['queue'], 40)}"
    if event.get("eta"):
        yield f"eta={plain(event['eta'], 40)}"
    if event.get("retries"):
        yield f"retries={plain(event['retries'], 12)}"


def call_text(event: Event, chars_max: int = DETAIL_CHARS_MAX) -> str:
    """What a task is called with, `(7, 'a', {'b': 1})`; nothing if the event does not tell."""
    args, kwargs = plain(event.get("args"), chars_max), plain(event.get("kwargs"), chars_max)
    if not (args or kwargs):
        return ""
    inside = [_bare(args), kwargs if kwargs != "{}" else ""]
    return plain(f"({', '.join(part for part in inside if part)})", chars_max)


def _bare(text: str) -> str:
    """`(2, 3)` without its brackets, as the call shows its own."""
    if len(text) >= 2 and text[0] + text[-1] in ("()", "[]"):
        return text[1:-1].rstrip(",")
    return text


def _success(event: Event) -> Iterator[str]:
    runtime = number(event.get("runtime"))
    if runtime is not None:
        yield seconds(runtime)
    if "result" in event:
        yield f"→ {plain(event['result'])}"


def _error(event: Event) -> Iterator[str]:
    runtime = number(event.get("runtime"))
    if runtime is not None:
        yield seconds(runtime)
    if "exception" in event:
        yield plain(event["exception"])


def _revocation(event: Event) -> Iterator[str]:
    if event.get("expired"):
        yield "expired"
    if event.get("terminated"):
        signum = event.get("signum")
        yield "terminated" if signum is None else f"terminated with signal {plain(signum, 16)}"


def _rejection(event: Event) -> Iterator[str]:
    if event.get("requeue"):
        yield "back to the queue"


def _node(event: Event) -> Iterator[str]:
    if "active" in event:
        yield f"active={plain(event['active'], 16)}"
    if "processed" in event:
        yield f"processed={plain(event['processed'], 16)}"
    load = first_load(event.get("loadavg"))
    if load is not None:
        yield f"load={load:.2f}"
    if event.get("lost"):
        yield f"lost={plain(event['lost'], 16)}"


def _whole_node(event: Event) -> Iterator[str]:
    yield software(event.get("sw_ident"), event.get("sw_ver"))
    yield from _node(event)


def first_load(loadavg: Any) -> float | None:
    """The load of the last minute, of the three that a node tells."""
    return number(loadavg[0]) if isinstance(loadavg, (list, tuple)) and loadavg else None


def software(ident: Any, version: Any) -> str:
    """What a node runs: `umbel 0.1.0`."""
    return f"{plain(ident, 24).removeprefix('py-')} {plain(version, 24)}".strip()


_DETAILS: dict[str, Callable[[Event], Iterator[str]]] = {
    "task-sent": _call,
    "task-received": _call,
    "task-started": lambda event: iter(()),
    "task-succeeded": _success,
    "task-failed": _error,
    "task-retried": _error,
    "task-revoked": _revocation,
    "task-rejected": _rejection,
    "worker-online": _whole_node,
    "worker-offline": _whole_node,
    "worker-heartbeat": _node,
}
# Their details are coloured too: they are what one looks for.
_TELLING = frozenset({"task-failed", "task-retried", "worker-heartbeat"})
