"""Events as an enemy, or a broken peer, would send them; the same ones for the same seed.

Clocks are either sane (at most `SANE_CLOCK_MAX`) or far beyond any bound, so that a test can tell
where a clock that took over only sane ones must be.
"""

from __future__ import annotations

import bz2
import json
import pickle
import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import yaml

JSON = "application/json"
PICKLE = "application/x-python-serialize"
YAML = "application/x-yaml"
MSGPACK = "application/x-msgpack"
SANE_CLOCK_MAX = 1_000_000

KINDS = (
    *("task-sent", "task-received", "task-started", "task-succeeded", "task-failed"),
    *("worker-online", "worker-heartbeat", "worker-offline", "worker-elect", "custom-thing"),
)
FIELDS = ("type", "hostname", "timestamp", "clock", "pid", "uuid", "seq", "inc", "utcoffset")
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "5", "x" * 5_000, [], {}, [1], {"a": 1}, [[[[[]]]]]),
    *(-1, -0.0, 1.5, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *(2**53 - 1, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**300, 2**52),
    *("\ud800", "\0", "Infinity", {"__type__": "datetime", "__value__": "no"}),
    *({"__type__": "uuid", "__value__": {}}, {"__type__": "x", "__value__": 1}),
)
ODD_TYPES = ("text/plain", "", "application/data", "application/JSON", "\u2603", "a" * 200)
ALIASES = "a: &a [x, x]\n" + "\n".join(
    f"{name}: &{name} [*{before}, *{before}, *{before}, *{before}, *{before}, *{before}]"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


class Message(NamedTuple):
    """What reaches a receiver."""

    body: Any
    content_type: Any
    content_encoding: Any
    headers: Any


class Dice:
    """Cheaper ones than those of the library: most of the time goes into throwing them."""

    def __init__(self, source: random.Random) -> None:
        self.random = source.random
        self.randbytes = source.randbytes

    def choice(self, among: Any) -> Any:
        return among[int(self.random() * len(among))]

    def randrange(self, start: int, stop: int | None = None) -> int:
        if stop is None:
            start, stop = 0, start
        return start + int(self.random() * (stop - start))


class Mutations:
    """An endless supply; see the module's text."""

    def __init__(self, source: random.Random) -> None:
        self._dice = Dice(source)
        # Made once: what is expensive to make is not what is to be tested.
        self._bombs = [
            (zlib.compress(b"[" * 2**25), "application/x-gzip"),
            (zlib.compress(b'{"type": "' + b"x" * 2**25), "application/x-gzip"),
            (bz2.compress(b" " * 2**25), "application/x-bz2"),
        ]
        self._samples = [
            *(pickle.dumps(self.event()) for _ in range(10)),
            *(msgspec.msgpack.encode(self.event()) for _ in range(10)),
            *(yaml.safe_dump(self.event()).encode() for _ in range(8)),
            ALIASES.encode(),
            b"!!python/object/apply:os.abort []",
        ]
        self._makers: tuple[tuple[Callable[[], Message], int], ...] = (
            (self._bent, 40),
            (self._chewed, 30),
            (self._listed, 10),
            (self._nested, 5),
            (self._foreign, 8),
            (self._packed, 4),
            (self._mislabelled, 3),
        )
        self._choices = [maker for maker, share in self._makers for _ in range(share)]
        self._made = 0

    def message(self) -> Message:
        """What can be published: bytes with a label."""
        self._made += 1
        if self._made % 10_000 == 0:
            body, method = self._dice.choice(self._bombs)
            return Message(body, JSON, "utf-8", {"compression": method})
        return self._dice.choice(self._choices)()

    def wild_message(self) -> Message:
        """Also what only a transport without a server could let through."""
        dice = self._dice
        message = self.message()
        if dice.random() < 0.9:
            return message
        odd = dice.choice((None, 5, [], {}, object(), b"", "", message.body, "text"))
        return message._replace(**{dice.choice(Message._fields): odd})

    def event(self) -> dict[str, Any]:
        """A good one."""
        dice = self._dice
        kind = dice.choice(KINDS)
        event: dict[str, Any] = {
            "type": kind,
            "hostname": f"w{dice.randrange(20)}@test",
            "timestamp": 1.8e9 + dice.random(),
            "clock": dice.randrange(SANE_CLOCK_MAX),
            "pid": dice.randrange(50_000),
            "utcoffset": dice.choice((0, -5.5, 3)),
            "seq": dice.randrange(1, 10_000),
            "inc": dice.randrange(5),
        }
        if kind.startswith("task-"):
            event["uuid"] = f"id-{dice.randrange(1000)}"
        if kind == "task-sent" and dice.random() < 0.5:
            event["sync"] = dice.choice((True, 1, "yes"))
        return event

    # -- kinds of mutation ---------------------------------------------------------------------

    def _bent_event(self) -> Any:
        """A field or two are missing, odd or new."""
        dice = self._dice
        event = self.event()
        for _ in range(dice.choice((0, 1, 1, 2, 5))):
            name = dice.choice(FIELDS)
            if dice.random() < 0.3:
                event.pop(name, None)
            else:
                event[name] = dice.choice(ODD_VALUES)
        if dice.random() < 0.1:
            event[dice.choice(("local_received", "id", "\ud83d", ""))] = dice.choice(ODD_VALUES)
        return event if dice.random() < 0.98 else dice.choice(ODD_VALUES)

    def _bent(self) -> Message:
        return Message(_text(self._bent_event()), JSON, "utf-8", {})

    def _listed(self) -> Message:
        count = self._dice.choice((0, 1, 2, 5, 30))
        return Message(_text([self._bent_event() for _ in range(count)]), JSON, "utf-8", {})

    def _chewed(self) -> Message:
        """Bytes are flipped, cut out, doubled or put in."""
        dice = self._dice
        data = bytearray(_text(self.event()))
        for _ in range(dice.choice((1, 1, 1, 2, 8))):
            place = dice.randrange(len(data) + 1)
            match dice.randrange(4):
                case 0:
                    data[place : place + 1] = bytes([dice.randrange(256)])
                case 1:
                    del data[place : place + dice.randrange(1, 30)]
                case 2:
                    data[place:place] = dice.choice(
                        (b"[", b"{", b"\0", b'"', b"\xff", b"\\u", b"e9")
                    )
                case _:
                    data[place:place] = data[place : place + dice.randrange(1, 6)]
        return Message(bytes(data), JSON, "utf-8", {})

    def _nested(self) -> Message:
        dice = self._dice
        depth = dice.choice((10, 33, 200, 1_000, 5_000))
        opened, closed = dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[[],", b"]")))
        inner = opened * depth + b"1" + (closed * depth if dice.random() < 0.7 else b"")
        if dice.random() < 0.5:
            inner = _text(self.event())[:-1] + b', "x": ' + inner + b"}"
        digits = b"9" * dice.choice((20, 400, 5_000))
        number = b'{"clock": ' + digits + b', "type": "x"}'
        return Message(dice.choice((inner, inner, number)), JSON, "utf-8", {})

    def _foreign(self) -> Message:
        """Other formats, with their own label or with another one's."""
        body = self._dice.choice(self._samples)
        label = self._dice.choice((PICKLE, YAML, MSGPACK, JSON))
        return Message(body, label, self._dice.choice(("binary", "utf-8", "latin-1", "\0")), {})

    def _packed(self) -> Message:
        dice = self._dice
        body = dice.choice((zlib.compress, bz2.compress, bytes))(_text(self._bent_event()))
        cut = body[: dice.randrange(len(body))] if dice.random() < 0.3 else body
        methods = (
            "application/x-gzip",
            "application/x-bz2",
            "application/x-lzma",
            "zstd",
            "no",
            "",
        )
        return Message(cut, JSON, "utf-8", {"compression": dice.choice(methods)})

    def _mislabelled(self) -> Message:
        dice = self._dice
        body = dice.randbytes(dice.randrange(200)) if dice.random() < 0.5 else _text(self.event())
        return Message(body, dice.choice(ODD_TYPES), dice.choice(("utf-16", "", "binary")), {})


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()
