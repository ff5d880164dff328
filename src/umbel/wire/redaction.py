"""What of a task's arguments may be shown in headers, events and logs.

A value is hidden because of the name it stands under: a keyword, a parameter of the task for a
positional argument, a key of a mapping inside of either, a field of a named tuple. It shows as
`'**'`; None, True and False are no secrets. A call inside of the arguments, as in a chord or a
map, follows the rules of its own task. An object whose own repr names a secret is hidden whole.
What a text *says* is not looked into, and errors are shown as they are.

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

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fnmatch import translate
from functools import lru_cache
from inspect import Parameter, Signature
from itertools import islice
from typing import Any, Final, Protocol
from uuid import UUID

from umbel.wire.masking import MASK
from umbel.wire.reprs import safe_repr

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

_PLAIN: Final = frozenset(
    {str, bytes, int, float, bool, type(None), datetime, date, time, timedelta, Decimal, UUID}
)
_LISTS: Final = (list, tuple, set, frozenset)
_SEQUENCES: Final = frozenset({tuple, list})
_EMPTY: Final = frozenset({"()", "[]", "{}", ""})
_PYTHON: Final = frozenset({"py", None})
# `'name': value` and `name=value`, unless the value is hidden already or tells nothing.
_KEYED: Final = re.compile(
    r"""(?:'([^'\\]{1,128})'|"([^"\\]{1,128})")\s*:(?!\s*(?:['"]\*\*|(?:None|True|False)\b))"""
)
_ASSIGNED: Final = re.compile(r"""\b([^\W\d]\w{0,127})=(?!['"]\*\*|(?:None|True|False)\b)""")
_WORD_ENDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W_]+")
_NAMES_REMEMBERED_MAX: Final = 10_000
_NAME_CHARS_REMEMBERED_MAX: Final = 128
_FEW: Final = 32
_SHORT: Final = 256
_SHOWN: Final = 2**64
_SCALARS: Final = frozenset({float, bool, type(None)})
_ROUND: Final = str.maketrans("[]", "()")
_CUT: Final = "..."
_STEM_CHARS_MIN: Final = 64
# So much of the beginning of a secret gives it away.
_BEGIN_CHARS: Final = 6


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
        self.hides_all = self.hides_result = switch is True
        more = tuple(switch) if isinstance(switch, _LISTS) else ()
        self.secret = secret_names(() if switch is False else (*names, *more))
        self.shows_all = not self.secret and not self.hides_all
        self._places, self._rest_from = _places_in(signature, self.secret)
        self.hides_places = self.hides_all or bool(self._places) or self._rest_from is not None
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
                    return text
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

    def hides_place(self, place: int) -> bool:
        """Whether the positional argument at this place is secret."""
        return place in self._places or (self._rest_from is not None and place >= self._rest_from)

    def _text(self, value: Any, hidden: str) -> tuple[str, list[Any]]:
        """The text of a value, and the secrets that are not in it."""
        if self.shows_all or not value or self._is_harmless(value):
            return safe_repr(value, CHARS_MAX, DEPTH_MAX), []
        if self.hides_all:
            return hidden, [value]
        look = _Look(self)
        try:
            shown = look.arguments(value) if hidden is HIDDEN_ARGS else look.value(value, DEPTH_MAX)
        except Exception:  # noqa: BLE001 - somebody else's mapping
            return hidden, [value]
        return safe_repr(shown, CHARS_MAX, DEPTH_MAX), look.secrets

    def _is_harmless(self, value: Any) -> bool:
        """Whether these are the usual arguments, few and flat, with nothing to hide."""
        if self.hides_all:
            return False
        if type(value) is dict and len(value) <= _FEW:
            for name, item in value.items():
                if type(item) not in _PLAIN or type(name) is not str or name in self.secret:
                    return False
            return True
        if self.hides_places or type(value) not in _SEQUENCES or len(value) > _FEW:
            return False
        for item in value:  # noqa: SIM110 - a generator costs more than the walk
            if type(item) not in _PLAIN:
                return False
        return True

    def _suspects(self, header: Header, args: str, kwargs: str) -> bool:
        """Whether these texts of a peer may tell a secret."""
        if self.shows_all:
            return False
        return (
            (self.hides_places and args not in _EMPTY)
            or header.lang not in _PYTHON  # who knows how that writes a mapping
            or self.secret.in_text(args)
            or self.secret.in_text(kwargs)
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
        return hidden if any(_is_told(secret, told) for secret in secrets) else told


@lru_cache(maxsize=64)
def by_name(names: tuple[str, ...]) -> Redaction:
    """The rules for tasks of which nothing but the name is known."""
    return Redaction(names)


def redacted_repr(value: Any, max_chars: int) -> str:
    """The text of a value that nothing is known about: the usual names are hidden."""
    look = _Look(by_name(DEFAULT_NAMES))
    try:
        return safe_repr(look.value(value, DEPTH_MAX), max_chars, DEPTH_MAX)
    except Exception:  # noqa: BLE001 - somebody else's mapping
        return HIDDEN_RESULT


def fault_of(switch: Any) -> str:
    """What is wrong with a task's own switch, if anything."""
    if isinstance(switch, bool):
        return ""
    if isinstance(switch, _LISTS) and all(isinstance(name, str) and name for name in switch):
        return ""
    return "give True (hide all), False (hide nothing), or names such as ('card', 'cvc')"


class Names:
    """Tells secret names from others."""

    def __init__(self, names: Iterable[str]) -> None:
        given = list(names)
        words = {_words(name).replace("_", "_?") for name in given if not _is_pattern(name)}
        any_word = "|".join(sorted(words - {""}))
        rules = [f"(?:.*_)?(?:{any_word})s?[0-9]*(?:_.*)?\\Z"] if any_word else []
        rules += [translate(n.casefold().replace("-", "_")) for n in given if _is_pattern(n)]
        self._rule = re.compile("|".join(rules), re.DOTALL) if rules else None
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return self._rule is not None

    def __contains__(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            known = self._rule is not None and bool(self._rule.match(_words(name)))
            if len(self._known) >= _NAMES_REMEMBERED_MAX:
                self._known.clear()
            if len(name) <= _NAME_CHARS_REMEMBERED_MAX:
                self._known[name] = known
        return known

    def in_text(self, text: str) -> bool:
        """Whether a text seems to tell what stands under a secret name."""
        if ":" in text and any((a or b) in self for a, b in _KEYED.findall(text)):
            return True
        return "=" in text and any(name in self for name in _ASSIGNED.findall(text))


@lru_cache(maxsize=256)
def secret_names(names: tuple[str, ...]) -> Names:
    """Prepared once for all tasks that share them."""
    return Names(names)


class _Look:
    """One look at some arguments; what is secret is replaced in a copy of what holds it.

    It goes in the order in which the text is written and ends with it at the latest: `left` values
    fill it, however short they are.
    """

    __slots__ = ("left", "rules", "secrets")

    def __init__(self, rules: Redaction) -> None:
        self.rules = rules
        self.left = CHARS_MAX
        self.secrets: list[Any] = []

    def value(self, value: Any, depth: int) -> Any:
        """`value` without secrets: itself where it has none."""
        self.left -= 1
        if type(value) in _PLAIN:
            return value
        if self.left < 0:
            return ...  # the text is full before it
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            fields = getattr(value, "_fields", None)  # of a named tuple
            if isinstance(fields, tuple):
                return self._items(value, depth, lambda place: fields[place] in self.rules.secret)
            return self._items(value, depth)
        if not isinstance(value, (str, bytes, int, float)):
            text = safe_repr(value, CHARS_MAX, DEPTH_MAX)
            if self.rules.secret.in_text(text):
                return self._hide(value)
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
            changed = changed or new is not item
            made[key] = new
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


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _words(name: str) -> str:
    return _WORD_ENDS.sub("_", name[:CHARS_MAX]).casefold().strip("_")


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
