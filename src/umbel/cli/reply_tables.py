"""What nodes answered, as tables: one shape per command.

Pure: answers and the time come in, sheets go out. Nothing is trusted to be of the shape that it
should have; an answer of another one is shown as JSON under its node, next to those that fit. Rows
that several nodes have in common (settings, registered tasks, revoked ids) are shown once, with the
nodes that have them: where nodes differ is what one looks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from umbel.cli.plain import count, number, plain, seconds
from umbel.cli.sheets import Block, Part, Row, Sheet
from umbel.wire.masking import masked

Answers = Mapping[str, Any]

NAMES_SHOWN_MAX = 5
NODE_CHARS_MAX = 64
ARGUMENT_CHARS_MAX = 100
VALUE_CHARS_MAX = 200
TEXT_LINES_MAX = 2_000
OBEYED = "obeyed"
# What `stats` says of refused input, and what to call it.
REFUSED_KEYS = {
    "refused": "task messages",
    "control_refused": "control messages",
    "gossip_refused": "events",
    "replies_refused": "replies",
    "greetings_refused": "greetings",
}
UNKNOWN = "?"

# What an answer that is not of the expected shape raises on the way into a row.
_MISSHAPEN = (TypeError, KeyError, ValueError, AttributeError, IndexError)


def parts_for(command: str, answers: Answers, now: float) -> list[Part]:
    """The answers of all nodes but those that are errors, ready to be shown; `now` is Unix time."""
    fine = {node: answers[node] for node in sorted(answers) if error_in(answers[node]) is None}
    layout = _LAYOUTS.get(command, _plain_answers)
    found = layout(fine, now)
    return [part for part in found if isinstance(part, Block) or part.rows]


def error_in(answer: Any) -> str | None:
    """The error that a node answered, or None."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), str) and "ok" not in answer:
        return str(answer["error"])
    return None


def as_json(answers: Answers) -> str:
    """`{node: answer}` on one line that no terminal can misunderstand; reads back the same."""
    text = json.dumps(answers, ensure_ascii=False, default=repr)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def without_secrets(command: str, answers: Answers) -> dict[str, Any]:
    """The answers with the settings in them masked, whoever forgot to."""
    if command != "conf":
        return dict(answers)
    return {
        node: {name: masked(str(name), value) for name, value in answer.items()}
        if isinstance(answer, dict) and error_in(answer) is None
        else answer
        for node, answer in answers.items()
    }


def names(nodes: list[str], chars_max: int = NODE_CHARS_MAX) -> str:
    """Some names of nodes, and how many more there are."""
    shown = ", ".join(plain(node, chars_max) for node in nodes[:NAMES_SHOWN_MAX])
    more = len(nodes) - NAMES_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


# -- from answers to sheets --------------------------------------------------------------------


def _sheet(
    titles: Row, answers: Answers, rows_of: Callable[[Any], Iterator[Row]], right: str = ""
) -> list[Part]:
    """A row begins with the name of its node; what does not fit goes into a sheet of its own."""
    rows: list[Row] = []
    odd: dict[str, Any] = {}
    for node, answer in answers.items():
        try:
            rows += [(plain(node, NODE_CHARS_MAX), *row) for row in rows_of(answer)]
        except _MISSHAPEN:
            odd[node] = answer
    return [Sheet(("node", *titles), rows, frozenset(right.split())), *_odd(odd)]


def _merged(titles: Row, answers: Answers, rows_of: Callable[[Any], Iterator[Row]]) -> list[Part]:
    """Every row once, and which nodes have it."""
    holders: dict[Row, list[str]] = {}
    odd: dict[str, Any] = {}
    for node, answer in answers.items():
        try:
            for row in dict.fromkeys(rows_of(answer)):
                holders.setdefault(row, []).append(node)
        except _MISSHAPEN:
            odd[node] = answer
    everybody = len(answers) - len(odd)
    rows = [
        (*row, "all" if len(nodes) == everybody > 1 else names(nodes))
        for row, nodes in sorted(holders.items())
    ]
    return [Sheet((*titles, "nodes"), rows), *_odd(odd)]


def _odd(answers: Answers) -> list[Part]:
    return _plain_answers(answers, 0.0) if answers else []


def _plain_answers(answers: Answers, _now: float) -> list[Part]:
    return [
        Sheet(
            ("node", "answer"),
            [(plain(node, NODE_CHARS_MAX), _said(answer)) for node, answer in answers.items()],
        )
    ]


def _said(answer: Any) -> str:
    if answer is None:
        return OBEYED
    if isinstance(answer, dict) and answer.keys() == {"ok"} and isinstance(answer["ok"], str):
        return plain(answer["ok"], VALUE_CHARS_MAX)
    return _value(answer)


def _value(value: Any, chars_max: int = VALUE_CHARS_MAX) -> str:
    """Text as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return plain(text, chars_max)


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not a table")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


# -- one layout per command --------------------------------------------------------------------


def _clock(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        yield (_value(_table(answer)["clock"]),)

    return _sheet(("clock",), answers, rows, right="clock")


def _active(answers: Answers, now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        for request in _list(answer):
            yield (*_request(request), _running(request, now), _pid(request))

    return _sheet((*_REQUEST, "running", "pid"), answers, rows, right="running pid")


def _reserved(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        return (_request(request) for request in _list(answer))

    return _sheet(_REQUEST, answers, rows)


def _scheduled(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        for entry in _list(answer):
            yield (plain(_table(entry)["eta"], 40), *_request(entry["request"]))

    return _sheet(("eta", *_REQUEST), answers, rows)


def _query_task(answers: Answers, now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        for state, request in _table(answer).values():
            _id, *rest = _request(request)
            yield (_id, plain(state, 20), *rest, _running(request, now))

    titles = (_REQUEST[0], "state", *_REQUEST[1:], "running")
    return _sheet(titles, answers, rows, right="running")


_REQUEST = ("id", "task", "args", "kwargs")


def _request(request: Any) -> Row:
    found = _table(request)
    return (
        plain(found["id"], 64),
        plain(found.get("name") or found.get("type"), 80),
        _value(found.get("args"), ARGUMENT_CHARS_MAX),
        _value(found.get("kwargs"), ARGUMENT_CHARS_MAX),
    )


def _running(request: Any, now: float) -> str:
    began = number(_table(request).get("time_start"))
    return "" if began is None else seconds(max(0.0, now - began))


def _pid(request: Any) -> str:
    return plain(_table(request).get("worker_pid"), 12)


def _revoked(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        return ((plain(one, 64),) for one in _list(answer))

    return _merged(("id",), answers, rows)


def _registered(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        for line in _list(answer):
            name, _, rest = str(line).partition(" [")
            yield plain(name, 120), plain(rest.removesuffix("]"), 120)

    sheet, *odd = _merged(("task", "attributes"), answers, rows)
    return [_without_empty(sheet, "attributes"), *odd]


def _without_empty(part: Part, title: str) -> Part:
    """The sheet without a column in which nothing stands."""
    if isinstance(part, Block) or title not in part.titles:
        return part
    place = part.titles.index(title)
    if any(row[place] for row in part.rows):
        return part
    cut = [row[:place] + row[place + 1 :] for row in part.rows]
    return Sheet(part.titles[:place] + part.titles[place + 1 :], cut, part.right)


def _conf(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        for name, value in _table(answer).items():
            yield plain(name, 80), _value(masked(str(name), value))

    return _merged(("setting", "value"), answers, rows)


def _stats(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        found = _table(answer)
        pool, broker = found.get("pool") or {}, found.get("broker") or {}
        yield (
            plain(found.get("pid"), 12),
            seconds(number(found.get("uptime"))),
            plain(found.get("clock"), 20),
            _last_word(pool.get("implementation")),
            plain(pool.get("max-concurrency"), 12),
            plain(found.get("prefetch_count"), 12),
            str(sum(count(value) or 0 for value in _table(found["total"]).values())),
            _mebibytes((found.get("rusage") or {}).get("maxrss")),
            _place(broker),
        )

    def totals(answer: Any) -> Iterator[Row]:
        for name, value in sorted(_table(_table(answer)["total"]).items()):
            yield plain(name, 120), plain(value, 20)

    def refused(answer: Any) -> Iterator[Row]:
        own = _table(answer).get("umbel") or {}
        for key, what in REFUSED_KEYS.items():
            for reason, value in sorted(_table(own.get(key) or {}).items()):
                yield what, plain(reason, 40), plain(value, 20)

    titles = ("pid", "uptime", "clock", "pool", "slots", "prefetch", "tasks", "memory", "broker")
    right = "pid uptime clock slots prefetch tasks memory"
    main, *odd = _sheet(titles, answers, rows, right)
    by_task = _sheet(("task", "count"), answers, totals, right="count")[0]
    by_reason = _sheet(("refused", "reason", "count"), answers, refused, right="count")[0]
    return [main, by_task, by_reason, *odd]


def _last_word(value: Any) -> str:
    """`celery.concurrency.prefork:TaskPool` is as good as `prefork:TaskPool`."""
    return plain(str(value).rpartition(".")[2], 40) if value else ""


def _mebibytes(kibibytes: Any) -> str:
    found = number(kibibytes)
    return "" if found is None else f"{found / 1024:.0f} MiB"


def _place(broker: Mapping[str, Any]) -> str:
    where = plain(broker.get("hostname"), 80)
    port = f":{plain(broker['port'], 8)}" if broker.get("port") else ""
    path = plain(broker.get("virtual_host"), 40).strip("/")
    return f"{plain(broker.get('transport'), 20)}://{where}{port}/{path}"


def _active_queues(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        for queue in _list(answer):
            exchange = _table(queue).get("exchange") or {}
            flags = ("durable", "exclusive", "auto_delete", "no_ack")
            yield (
                plain(queue["name"], 80),
                plain(exchange.get("name"), 80),
                plain(exchange.get("type"), 20),
                plain(queue.get("routing_key"), 80),
                " ".join(flag.replace("_", "-") for flag in flags if queue.get(flag)),
            )

    return _sheet(("queue", "exchange", "type", "routing key", "flags"), answers, rows)


def _queue_lengths(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        for name, length in sorted(_table(answer).items()):
            yield plain(name, 80), UNKNOWN if count(length) is None else str(length)

    return _sheet(("queue", "waiting"), answers, rows, right="waiting")


def _elections(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        found = _table(answer)
        for name, one in _table(found.get("open", {})).items():
            candidates = names(list(map(str, _list(one["candidates"]))))
            yield plain(name, 64), "open", plain(one.get("topic"), 60), _age(one), candidates
        for name, one in _table(found.get("decided", {})).items():
            yield (
                plain(name, 64),
                "decided",
                "",
                _age(one),
                plain(one.get("winner"), NODE_CHARS_MAX),
            )
        for name, one in _table(found.get("declined", {})).items():
            yield plain(name, 64), "refused here", "", _age(one), plain(one.get("reason"), 200)

    titles = ("id", "state", "topic", "age", "winner or candidates")
    return _sheet(titles, answers, rows, right="age")


def _age(one: Any) -> str:
    return seconds(number(_table(one).get("age")))


def _text(answers: Answers, _now: float) -> list[Part]:
    return [Block(plain(node, NODE_CHARS_MAX), _lines(answer)) for node, answer in answers.items()]


def _lines(answer: Any) -> list[str]:
    text = answer.get("ok") if isinstance(answer, dict) else answer
    if not isinstance(text, str):
        return [_value(answer)]
    return [plain(line, 1_000) for line in text.splitlines()[:TEXT_LINES_MAX]]


def _objgraph(answers: Answers, _now: float) -> list[Part]:
    def rows(answer: Any) -> Iterator[Row]:
        yield (plain(_table(answer)["filename"]),)

    return _sheet(("file",), answers, rows)


_LAYOUTS: dict[str, Callable[[Answers, float], list[Part]]] = {
    "clock": _clock,
    "active": _active,
    "reserved": _reserved,
    "scheduled": _scheduled,
    "query_task": _query_task,
    "revoked": _revoked,
    "registered": _registered,
    "conf": _conf,
    "stats": _stats,
    "active_queues": _active_queues,
    "queue_lengths": _queue_lengths,
    "elections": _elections,
    "report": _text,
    "memdump": _text,
    "objgraph": _objgraph,
}
