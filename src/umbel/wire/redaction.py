"""What of a task's arguments, results and errors may be shown in headers, events and logs.

A value is hidden because of the name it stands under: a keyword, a parameter of the task for a
positional argument, a key of a mapping inside of either, a field of a named tuple. It shows as
`'**'`; None, True and False are no secrets. A call inside of the arguments, as in a chord or a
map, follows the rules of its own task. An object whose own repr names a secret is hidden whole.

The finished text is then searched for passwords of addresses and for what other people's words name
as a secret (`secret_texts`). The text of a result or an error also loses the secret arguments of
its task wherever it repeats them. Of an error in a task that hides everything (`redact=True`) only
its kind and place remain. Only texts are changed: the message and the stored result keep the
values, as the task and its caller need them.

Names are compared by words, whatever their case: `token` is in `access_token`, `accessToken`,
`X-Token` and `tokens`, and not in `tokenizer`. A name with `*`, `?` or `[` is a pattern for the
whole name, in lower case with an underscore between words.

`Redaction` is prepared once per task type. On the sending side it writes the texts itself. On the
receiving side the sender has: peers hide nothing, and whoever gave a text of his own meant it. So
texts in which nothing can be secret pass as they are. Otherwise the body is opened, and

| the text that came               | what is shown                                    |
| -------------------------------- | ------------------------------------------------ |
| is what we would write           | the same                                         |
| is the plain repr, perhaps cut   | ours                                             |
| is neither, and shows no secret  | the same: somebody's own words                   |
| is neither, and may show one     | nothing of it, `(**)` or `{**}`                  |
| body can not be opened           | nothing of it                                    |

Nothing here raises because of a value, and no more is looked at than can be shown.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from inspect import Parameter, Signature
from itertools import islice
from typing import Any, Final, Protocol
from uuid import UUID

from umbel.wire.masking import MASK
from umbel.wire.reprs import safe_repr
from umbel.wire.secret_texts import Names, secret_names

DEFAULT_NAMES: Final = (
    "*passwd*", "*password*", "access_key", "api_key", "auth", "authorization", "card_number",
    "cookie", "credential", "credit_card", "cvc", "cvv", "jwt", "otp", "pass", "passcode",
    "passphrase", "pin", "private_key", "pwd", "secret", "session_key", "ssn", "token",
)  # fmt: skip
HIDDEN_ARGS: Final = f"({MASK})"
HIDDEN_KWARGS: Final = f"{{{MASK}}}"
HIDDEN_RESULT: Final = repr(MASK)
CHARS_MAX: Final = 1024
DEPTH_MAX: Final = 3
# Longer texts of peers are cut before anybody looks at them.
PEER_CHARS_MAX: Final = 4096

Switch = bool | Iterable[str] | None

_WITHOUT_TEXT: Final = frozenset(
    {int, float, bool, type(None), datetime, date, time, timedelta, Decimal, UUID}
)
_PLAIN: Final = _WITHOUT_TEXT | {str, bytes}
_LISTS: Final = (list, tuple, set, frozenset)
_USUAL: Final = frozenset({dict, list, tuple})
_EMPTY: Final = frozenset({"()", "[]", "{}", ""})
_PYTHON: Final = frozenset({"py", None})
_FEW: Final = 32
_SHORT: Final = 256
_SHOWN: Final = 2**64
_SCALARS: Final = frozenset({float, bool, type(None)})
_ROUND: Final = str.maketrans("[]", "()")
_CUT: Final = "..."
_STEM_CHARS_MIN: Final = 64
# So much of the beginning of a secret gives it away.
_BEGIN_CHARS: Final = 6
# Shorter ones are in too many texts to be looked for.
_REPEATED_CHARS_MIN: Final = 4
_REPEATED_MAX: Final = 100
# Fields of events that others are found by.
_ABOUT: Final = frozenset(
    {"type", "hostname", "timestamp", "clock", "pid", "seq", "utcoffset", "sync", "uuid", "name",
     "root_id", "parent_id", "retries", "eta", "expires", "queue", "exchange", "routing_key",
     "runtime", "terminated", "signum", "expired", "requeue", "freq", "active", "processed",
     "loadavg", "sw_ident", "sw_ver", "sw_sys", "id", "topic", "cver", "action"}
)  # fmt: skip
_FIELD_VALUES_MAX: Final = 100_000
_FIELD_DEPTH_MAX: Final = 16


class Header(Protocol):
    """The part of a task's header that is about its arguments."""

    argsrepr: str | None
    kwargsrepr: str | None
    lang: str | None


class Redaction:
    """The rules for one task type; without a task, those by name alone."""

    def __init__(
        self,
        names: tuple[str, ...],
        switch: Switch = None,
        signature: Signature | None = None,
        find: Callable[[str], Redaction | None] | None = None,
    ) -> None:
        """`switch` is what the task itself says; `find` gives the rules of another task."""
        self.names, self.switch = names, switch
        self.hides_all = switch is True
        more = tuple(switch) if isinstance(switch, _LISTS) else ()
        self.secret = secret_names(() if switch is False else (*names, *more))
        self.shows_all = not self.secret and not self.hides_all
        self._places, self._rest_from = _places_in(signature, self.secret)
        self.hides_places = self.hides_all or bool(self._places) or self._rest_from is not None
        self._takes_secrets = self.hides_places or _takes_by_name(signature, self.secret)
        self.find = find

    def args_repr(self, args: Any) -> str:
        """The text of positional arguments."""
        if not self.hides_places and type(args) is tuple and len(args) <= _FEW:
            for item in args:  # the usual ones, which are looked at once
                kind = type(item)
                if kind is str:
                    if len(item) > _SHORT:
                        break
                elif kind is int:
                    if not -_SHOWN < item < _SHOWN:
                        break
                elif kind not in _SCALARS:
                    break
            else:
                text = repr(args)
                if len(text) <= CHARS_MAX:
                    return self.secret.masked(text) if "=" in text or ":" in text else text
        return self._text(args, HIDDEN_ARGS)[0]

    def kwargs_repr(self, kwargs: Any) -> str:
        """The text of keyword arguments."""
        return "{}" if type(kwargs) is dict and not kwargs else self._text(kwargs, HIDDEN_KWARGS)[0]

    def event_reprs(
        self, header: Header, open_body: Callable[..., tuple[Any, Any]], *given: Any
    ) -> tuple[str, str]:
        """The texts of args and kwargs for events.

        `open_body`, called with what is `given`, tells the values themselves; it may raise.
        """
        args, kwargs = header.argsrepr, header.kwargsrepr
        if args in _EMPTY and kwargs in _EMPTY:
            return args, kwargs  # nothing to hide, whatever the rules are
        args, kwargs = _short(args), _short(kwargs)
        if self.hides_all:
            return _hidden(args, HIDDEN_ARGS), _hidden(kwargs, HIDDEN_KWARGS)
        if args is not None and kwargs is not None and not self._suspects(header, args, kwargs):
            return args, kwargs
        try:
            opened, named = open_body(*given)
            return (
                self._checked(args, tuple(opened), HIDDEN_ARGS),
                self._checked(kwargs, named, HIDDEN_KWARGS),
            )
        except Exception:  # noqa: BLE001 - a bad body has its answer elsewhere
            if self.shows_all:
                return args or "", kwargs or ""
            return _hidden(args, HIDDEN_ARGS), _hidden(kwargs, HIDDEN_KWARGS)

    def result_repr(
        self, value: Any, chars_max: int = CHARS_MAX, args: Any = (), kwargs: Any = None
    ) -> str:
        """The text of what a task called with these arguments has returned."""
        if self.hides_all:
            return HIDDEN_RESULT
        text = self._usual_result(value)
        if not text or len(text) > chars_max:
            text = self._text(value, HIDDEN_RESULT, chars_max)[0]
        if self._takes_secrets and (self.hides_places or kwargs):
            text = _without(text, self.secrets_of(args, kwargs))
        return text

    def error_repr(self, exc: Any, secrets: Iterable[str] = ()) -> str:
        """The text of an error, without the `secrets_of` the call that it ended."""
        if self.hides_all:
            return f"{type(exc).__name__}({HIDDEN_RESULT})"
        return self.text(safe_repr(exc), secrets)

    def text(self, text: str, secrets: Iterable[str] = ()) -> str:
        """A text about a call, such as a traceback, without `secrets_of` it and all others."""
        return _without(self.secret.masked(text), secrets)

    def secrets_of(self, args: Any, kwargs: Any) -> list[str]:
        """The secrets among these arguments as texts, to be kept out of other texts."""
        if self.shows_all:
            return []
        look = _Look(self)
        try:
            look.arguments(args)
            look.value(kwargs, DEPTH_MAX)
        except Exception:  # noqa: BLE001 - somebody else's mapping
            look.secrets.append((args, kwargs))
        return list(islice(_leaves(look.secrets, DEPTH_MAX), _REPEATED_MAX))

    def fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of an event of somebody's own making, still as values."""
        if self.shows_all:
            return dict(given)
        if self.hides_all:
            return dict.fromkeys(given, MASK)
        look = _Look(self, _FIELD_VALUES_MAX, sys.maxsize)
        try:
            return dict(look.value(given, _FIELD_DEPTH_MAX))
        except Exception:  # noqa: BLE001 - somebody else's mapping
            return dict.fromkeys(given, MASK)

    def hides_place(self, place: int) -> bool:
        """Whether the positional argument at this place is secret."""
        return place in self._places or (self._rest_from is not None and place >= self._rest_from)

    def _usual_result(self, value: Any) -> str:
        """The text of a usual result, which is looked at once; empty for others."""
        kind = type(value)
        if kind is str:
            if len(value) > _SHORT:
                return ""
            text = repr(value)
            return self.secret.masked(text) if "=" in text or ":" in text else text
        if kind in _SCALARS or (kind is int and -_SHOWN < value < _SHOWN):
            return repr(value)
        return ""

    def _text(self, value: Any, hidden: str, chars_max: int = CHARS_MAX) -> tuple[str, list[Any]]:
        """The text of a value, and the secrets that are not in it."""
        if self.shows_all or not value:
            return safe_repr(value, chars_max, DEPTH_MAX), []
        if self.hides_all:
            return hidden, [value]
        if not (hidden is HIDDEN_ARGS and self.hides_places) and self._is_harmless(value):
            return safe_repr(value, chars_max, DEPTH_MAX), []
        look = _Look(self, chars_max)
        try:
            shown = look.arguments(value) if hidden is HIDDEN_ARGS else look.value(value, DEPTH_MAX)
        except Exception:  # noqa: BLE001 - somebody else's mapping
            return hidden, [value]
        return safe_repr(shown, chars_max, DEPTH_MAX), look.secrets

    def _is_harmless(self, value: Any, depth: int = DEPTH_MAX) -> bool:
        """Whether these are the usual values, few and of usual types, with nothing to hide."""
        kind = type(value)
        if kind not in _USUAL or len(value) > _FEW >> (DEPTH_MAX - depth):
            return False
        if kind is dict:
            if self.find is not None and "task" in value:
                return False  # perhaps a call, which has rules of its own
            for name in value:
                if type(name) is not str or "=" in name or ":" in name or name in self.secret:
                    return False
            value = value.values()
        for item in value:
            kind = type(item)
            if kind is str:
                if len(item) > _SHORT or (
                    ("=" in item or ":" in item) and self.secret.masked(item) is not item
                ):
                    return False
            elif kind not in _WITHOUT_TEXT and not (depth and self._is_harmless(item, depth - 1)):
                return False
        return True

    def _suspects(self, header: Header, args: str, kwargs: str) -> bool:
        """Whether these texts of a peer may tell a secret."""
        if self.shows_all:
            return False
        return (
            (self.hides_places and args not in _EMPTY)
            or header.lang not in _PYTHON  # who knows how that writes a mapping
            or self.secret.masked(args) is not args
            or self.secret.masked(kwargs) is not kwargs
            or (self.find is not None and ("'task'" in kwargs or "'task'" in args))
        )

    def _checked(self, told: str | None, value: Any, hidden: str) -> str:
        """What to show of a text that came with these values: see the table above."""
        if told is not None and self.shows_all:
            return told
        ours, secrets = self._text(value, hidden)
        if told is None or told == ours:
            return ours
        if _is_alike(told, safe_repr(value, CHARS_MAX, DEPTH_MAX)):
            return ours
        return hidden if any(_is_told(one, told) for one in secrets) else self.secret.masked(told)


@lru_cache(maxsize=64)
def by_name(names: tuple[str, ...]) -> Redaction:
    """The rules for tasks of which nothing but the name is known."""
    return Redaction(names)


def redacted_repr(value: Any, max_chars: int) -> str:
    """The text of a value that nothing is known about: the usual names are hidden."""
    return by_name(DEFAULT_NAMES).result_repr(value, max_chars)


def redacted_text(text: str) -> str:
    """A text that nothing is known about: the usual names are hidden."""
    return by_name(DEFAULT_NAMES).text(text)


def redact_event(event: dict[str, Any], rules: Redaction) -> None:
    """Hide, in place, the secrets of an event that is to be shown or kept.

    Umbel's own senders, known by `inc`, have done so as their tasks want it; only what is to be
    done after an election had to travel whole. What an event is about stays as it is, or nothing
    would fit together any more.
    """
    if "action" in event:
        event["action"] = _shown_action(event["action"], rules)
    if "inc" not in event:
        given = {name: event.pop(name) for name in event.keys() - _ABOUT}
        event.update(rules.fields(given))


def _shown_action(action: Any, rules: Redaction) -> Any:
    """Of a call only which task it is of, and its id: nobody knows here what it is called with."""
    if not isinstance(action, Mapping):
        return rules.fields({"action": action})["action"]
    options = action.get("options")
    task_id = options.get("task_id") if isinstance(options, Mapping) else None
    return {"task": action.get("task"), "options": {"task_id": task_id}}


def fault_of(switch: Any) -> str:
    """What is wrong with a task's own switch, if anything."""
    if isinstance(switch, bool):
        return ""
    if isinstance(switch, _LISTS) and all(isinstance(name, str) and name for name in switch):
        return ""
    return "give True (hide all), False (hide nothing), or names such as ('card', 'cvc')"


class _Look:
    """One look at some arguments; what is secret is replaced in a copy of what holds it.

    It goes in the order in which the text is written and ends with it at the latest: `left` values
    fill it, however short they are.
    """

    __slots__ = ("left", "rules", "secrets", "text_chars_max")

    def __init__(
        self, rules: Redaction, left: int = CHARS_MAX, text_chars_max: int | None = None
    ) -> None:
        self.rules = rules
        self.left = left
        # The rest of a text cannot be shown.
        self.text_chars_max = 2 * left if text_chars_max is None else text_chars_max
        self.secrets: list[Any] = []

    def value(self, value: Any, depth: int) -> Any:
        """`value` without secrets: itself where it has none."""
        self.left -= 1
        if type(value) in _WITHOUT_TEXT:
            return value
        if isinstance(value, (str, bytes)):
            return self._searched(value)
        if self.left < 0:
            return ...  # the text is full before it
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            fields = getattr(value, "_fields", None)  # of a named tuple
            if isinstance(fields, tuple):
                return self._items(value, depth, lambda place: fields[place] in self.rules.secret)
            return self._items(value, depth)
        if not isinstance(value, (int, float)):
            text = safe_repr(value, CHARS_MAX, DEPTH_MAX)
            if self.rules.secret.masked(text) is not text:
                return self._hide(value)
        return value

    def _searched(self, value: Any) -> Any:
        """A text without the secrets in it; whatever else as it is."""
        if isinstance(value, str):
            text = value[: self.text_chars_max]
            found = self.rules.secret.masked(text)
            return found if found is not text else value
        if isinstance(value, bytes):
            text = value[: self.text_chars_max].decode("latin-1")
            found = self.rules.secret.masked(text)
            return found.encode("latin-1") if found is not text else value
        return value

    def arguments(self, value: Any, depth: int = DEPTH_MAX) -> Any:
        """`value`, the positional arguments of the rules' task, without secrets."""
        if not isinstance(value, (list, tuple)):
            return self.value(value, depth)
        return self._items(
            value, depth, self.rules.hides_place if self.rules.hides_places else None
        )

    def _items(self, value: Any, depth: int, hides: Callable[[int], bool] | None = None) -> Any:
        if depth <= 0:
            return value
        made = [
            self._hide(item) if hides is not None and hides(place) else self.value(item, depth - 1)
            for place, item in enumerate(islice(value, max(self.left, 0)))
        ]
        if all(new is old for new, old in zip(made, value, strict=False)):
            return value
        return tuple(made) if isinstance(value, tuple) else made

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> Any:
        changed = not isinstance(value, dict)  # shown by its own repr it would know no depth
        if depth <= 0:
            return dict.fromkeys(islice(value, 1)) if changed else value
        call = self._rules_of_call(value)
        made = {}
        for key, item in islice(value.items(), max(self.left, 0)):
            if call is not None and key in ("args", "kwargs", "it"):
                new = self._part_of_call(call, key, item, depth - 1)
            elif _as_name(key) in self.rules.secret:
                new = self._hide(item)
            else:
                new = self.value(item, depth - 1)
            shown = self._searched(key)
            changed = changed or new is not item or shown is not key
            made[shown] = new
        return made if changed else value

    def _rules_of_call(self, value: Mapping[Any, Any]) -> Redaction | None:
        """The rules of the task that a mapping calls, once or for the items of `it`."""
        if self.rules.find is None:
            return None
        task = value.get("task")
        if isinstance(task, Mapping) and "it" in value:
            task = task.get("task")
        elif "args" not in value:
            return None
        return self.rules.find(task) if isinstance(task, str) else None

    def _part_of_call(self, rules: Redaction, key: str, part: Any, depth: int) -> Any:
        if rules.hides_all or (key == "it" and rules.hides_places):
            return self._hide(part) if part else part
        outer, self.rules = self.rules, rules
        try:
            return self.arguments(part, depth) if key == "args" else self.value(part, depth)
        finally:
            self.rules = outer

    def _hide(self, value: Any) -> Any:
        self.left -= 1
        if value is None or isinstance(value, bool):
            return value
        self.secrets.append(value)
        return MASK


def _places_in(signature: Signature | None, secret: Names) -> tuple[frozenset[int], int | None]:
    """The places of secret positional arguments, and from where on all of them are."""
    places, rest_from, place = set(), None, 0
    for parameter in signature.parameters.values() if signature is not None else ():
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            if parameter.name in secret:
                places.add(place)
            place += 1
        elif parameter.kind is Parameter.VAR_POSITIONAL and parameter.name in secret:
            rest_from = place
    return frozenset(places), rest_from


def _takes_by_name(signature: Signature | None, secret: Names) -> bool:
    """Whether secrets may come as keywords."""
    if not secret:
        return False
    parameters = () if signature is None else signature.parameters.values()
    return signature is None or any(
        one.kind is Parameter.VAR_KEYWORD or one.name in secret for one in parameters
    )


def _leaves(values: Iterable[Any], depth: int) -> Iterator[str]:
    """The texts of secrets that are long enough to be looked for."""
    for value in values:
        if isinstance(value, Mapping):
            found: Iterable[str] = _leaves(value.values(), depth - 1) if depth else ()
        elif isinstance(value, (list, tuple, set, frozenset)):
            found = _leaves(value, depth - 1) if depth else ()
        elif isinstance(value, (bytes, bytearray)):
            found = (value.decode("utf-8", "replace"),)
        else:
            found = (str(value),) if type(value) in _PLAIN else ()
        yield from (text for text in found if len(text) >= _REPEATED_CHARS_MIN)


def _without(text: str, secrets: Iterable[str]) -> str:
    """`text` with all of these texts replaced, also one that was cut off at its end."""
    for secret in sorted(secrets, key=len, reverse=True):
        for form in (secret, repr(secret)[1:-1]):
            text = text.replace(form, MASK)
            if text.endswith(_CUT):
                stem = text.removesuffix(_CUT)
                cut = _shared_chars(stem, form)
                text = f"{stem[:-cut]}{MASK}{_CUT}" if cut else text
    return text


def _shared_chars(stem: str, form: str) -> int:
    """How much of the beginning of a secret a text ends with; 0 if it is too little to be sure."""
    longest = min(len(form), CHARS_MAX) - 1
    counts = range(longest, _REPEATED_CHARS_MIN - 1, -1)
    return next((count for count in counts if stem.endswith(form[:count])), 0)


def _as_name(key: Any) -> str:
    if isinstance(key, str):
        return key
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else ""


def _short(text: str | None) -> str | None:
    if text is None or len(text) <= PEER_CHARS_MAX:
        return text
    return text[: PEER_CHARS_MAX - len(_CUT)] + _CUT


def _hidden(text: str | None, hidden: str) -> str:
    return text if text is not None and text in _EMPTY else hidden


def _is_alike(told: str, plain: str) -> bool:
    """Whether a text is the plain repr, but for where it was cut and what became a list."""
    told, plain = (text.translate(_ROUND).replace(",)", ")") for text in (told, plain))
    if told == plain:
        return True
    told_stem, cut, _ = told.partition(_CUT)
    plain_stem = plain.partition(_CUT)[0]
    common = min(len(told_stem), len(plain_stem))
    return bool(cut) and common >= _STEM_CHARS_MIN and told_stem[:common] == plain_stem[:common]


def _is_told(secret: Any, text: str) -> bool:
    """Whether a text seems to give a secret away; in doubt it does."""
    if type(secret) not in _PLAIN:
        return True
    written = safe_repr(secret, CHARS_MAX).strip("b'\"")
    return written[:_BEGIN_CHARS] in text or str(secret)[:_BEGIN_CHARS] in text
