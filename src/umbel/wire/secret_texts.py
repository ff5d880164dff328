"""Secrets inside of texts: passwords of addresses, and values under secret names.

Values are hidden where they are known as values (`redaction`). This module is for texts that
somebody else has written: messages of exceptions, tracebacks, reprs of objects, events of peers.
Both kinds of secrets show as `**`:

| in a text                                  | what is shown                          |
| ------------------------------------------ | -------------------------------------- |
| `redis://bob:SECRET@host`                  | `redis://bob:**@host`                  |
| `sqs://SECRET@`                            | `sqs://**@`                            |
| `password=SECRET`, `pin: SECRET`           | `password=**`, `pin: **`               |
| `'token': 'SECRET'`, `"token": "SECRET"`   | `'token': '**'`, `"token": "**"`       |
| `password=SecretStr('SECRET')`             | `password=**`                          |
| `Authorization: Bearer SECRET`             | `Authorization: **`                    |

None, True, False and null are not secrets. Where a text can be read in two ways, the reading that
hides more is taken. A secret that has no name next to it cannot be found.

All work is linear in the length of the text, whatever the text is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from functools import lru_cache
from typing import Final

from umbel.wire.masking import MASK

_WORD_ENDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W_]+")
_NAMES_REMEMBERED_MAX: Final = 10_000
_NAME_CHARS_REMEMBERED_MAX: Final = 128
_NAME_CHARS_MAX: Final = 1024

# What may stand between a name and its value. Texts have few of them, so names are looked for from
# here.
_SEPARATOR: Final = re.compile(
    r"(=(?<=[\w'\"\t ].)(?:>|(?!=))|:(?<=[\w'\"\t ].)(?:=|(?!//)))[ \t]{0,8}"
)
_SPACES_MAX: Final = 4
_WINDOW: Final = 136  # a name of 128 characters, escaped quotes
_NAME_REVERSED: Final = re.compile(r"[\w.-]{1,128}")
_BAD_IN_QUOTES: Final = re.compile(r"[\\=:\n]")
_NOT_SECRET: Final = re.compile(
    r"""['"\\]*\*\*(?=['"\\\s,;&()\[\]{}>@.]|\Z) | (?:None|True|False|null|true|false)(?!\w)""",
    re.VERBOSE,
)
_OPENING_QUOTE: Final = re.compile(r"[bBrRuUfF]{0,2}(\\{0,8}['\"])")
# Punctuation belongs to a value unless something ends after it.
_BARE: Final = re.compile(
    r"""(?: [^\s&'"<>,;()\[\]{}\\] | \\(?!['"]) | [,;)\]}'"](?![\s,;.:)\]}'"\\]|\Z) )+""",
    re.VERBOSE,
)
_BRACKETS: Final = re.compile(r"[\[\](){}'\"]")
_LINE: Final = re.compile(r"[^\r\n]*")
_HEADER_LINE: Final = re.compile(r"[^\r\n'\"]*")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
# The secret follows the name of how it is used.
_SCHEMES: Final = frozenset({"basic", "bearer", "digest", "negotiate", "token", "apikey"})
# Headers whose whole line is the value.
_WHOLE_LINES: Final = frozenset({"authorization", "proxy_authorization", "cookie", "set_cookie"})
_ERROR_ENDS: Final = ("Error", "Exception", "Warning")

_RUN: Final = re.compile(r"[^\s'\"<>]*")
_UNSPACED: Final = re.compile(r"\S*")
_USER: Final = re.compile(r"\[[^\]\s]*\]|[^\s/?#@:'\"<>]*")
_PORT: Final = re.compile(r"\d{1,5}(?=[/?#'\"<>,;)\]}\s\\]|\Z)(?!['\"]?\.\.\.)")
_USER_INFO: Final = re.compile(rf"://(?:{_USER.pattern})(?:@|:(?!{_PORT.pattern}))")
_NO_PORT: Final = re.compile(r"[^\s/?#'\"<>]*")
_PARAMETER: Final = re.compile(
    r"(?P<name>[?&;][\w.-]*(?:pass|pwd|secret|token|credential|api_?key|access_?key)[\w.-]*=)"
    r"[^\s&;'\"<>]+",
    re.IGNORECASE,
)


class Names:
    """Knows which names are secret, and hides the values under them in a text."""

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

    def masked(self, text: str) -> str:
        """`text` without secrets; the same object where there are none."""
        if self._rule is None or ("=" not in text and ":" not in text):
            return text
        if "://" in text and _USER_INFO.search(text):
            text = _mask_user_info(text)
        return self._mask_values(text)

    def _mask_values(self, text: str) -> str:
        pieces: list[str] = []
        done = 0
        found = _SEPARATOR.search(text)
        while found is not None:
            position = found.end()
            name = self._secret_before(text, found)
            if name is not None:
                is_header = found[1] == ":" and text[found.start() - 1] not in "'\""
                start, end = _value_at(text, position, name, is_header=is_header)
                if start < end:
                    pieces += (text[done:start], MASK)
                    done = end
                position = max(position, end)
            found = _SEPARATOR.search(text, position)
        return "".join((*pieces, text[done:])) if pieces else text

    def _secret_before(self, text: str, separator: re.Match[str]) -> str | None:
        """The secret name that stands before a separator, in quotes or bare; None if none does."""
        end = separator.start()
        stem = text[max(0, end - _WINDOW) : end]
        if stem[-1] in "\t ":
            stripped = stem.rstrip("\t ")
            if not stripped or len(stem) - len(stripped) > _SPACES_MAX:
                return None
            stem = stripped
        is_quoted = stem[-1] in "'\""
        if is_quoted:
            name = stem[:-1].rpartition(stem[-1])[2]
            if len(name) < len(stem) - 1 and name in self and not _BAD_IN_QUOTES.search(name):
                return name
            stem = stem[:-1].rstrip("\\")
        found = _NAME_REVERSED.match(stem[::-1])
        if found is None:
            return None
        name = found[0][::-1].lstrip(".-")
        if not name or name not in self or name.isdigit():
            return None
        if separator[1] == ":" and not is_quoted:
            if name.endswith(_ERROR_ENDS):
                return None  # the last line of a traceback, `TokenError: expired`
            before = stem[: -found.end()][-1:]
            if before in ("/", "@") and _PORT.match(text, separator.end()):
                return None  # a host of this name
        return name


@lru_cache(maxsize=256)
def secret_names(names: tuple[str, ...]) -> Names:
    """Prepared once for all tasks that share them."""
    return Names(names)


def mask_addresses(text: str) -> str:
    """`text` without the passwords of the addresses in it, whatever the settings are."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\g<name>{MASK}", _mask_user_info(text))


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _words(name: str) -> str:
    return _WORD_ENDS.sub("_", name[:_NAME_CHARS_MAX]).casefold().strip("_")


# -- values under names --------------------------------------------------------------------


def _value_at(text: str, start: int, name: str, *, is_header: bool) -> tuple[int, int]:
    """From where to where a text has the value that begins at `start`; nothing is (n, n)."""
    if _NOT_SECRET.match(text, start):
        return start, start
    quote = _OPENING_QUOTE.match(text, start)
    if quote is not None:
        return quote.end(), _end_of_quoted(text, quote.end(), quote[1])
    if is_header and _words(name) in _WHOLE_LINES:
        return start, _end_of(_HEADER_LINE, text, start)
    if text.startswith("<", start):
        end = text.find(">", start)
        return start, end + 1 if end >= 0 else _end_of(_LINE, text, start)
    end = _end_of_expression(text, start)
    if text[start:end].casefold() in _SCHEMES and text.startswith(" ", end):
        end = _end_of_expression(text, end + 1)
    return start, end


def _end_of_quoted(text: str, start: int, quote: str) -> int:
    """Where the closing quote is; without one, where the line ends."""
    end = start
    while (end := text.find(quote, end)) >= 0:
        if text[end - 1] == "\\" and end > start:
            end += len(quote)  # an escaped one
        elif text.startswith(quote, end + len(quote)):
            end += 2 * len(quote)  # a doubled one
        else:
            return end
    return _end_of(_LINE, text, start)


def _end_of_expression(text: str, start: int) -> int:
    """Where a word ends, with all brackets that follow it: `SecretStr('x')`."""
    end = _end_of(_BARE, text, start)
    while end < len(text) and text[end] in _OPENING:
        end = _end_of(_BARE, text, _end_of_brackets(text, end))
    return end


def _end_of_brackets(text: str, start: int) -> int:
    """Where brackets that open at `start` are closed; the end of the text if they never are."""
    depth, position = 0, start
    while (found := _BRACKETS.search(text, position)) is not None:
        sign, position = found[0], found.end()
        if sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth -= 1
            if depth == 0:
                return position
        else:
            position = _end_of_quoted(text, position, sign) + 1
    return len(text)


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return start if found is None else found.end()


# -- addresses -----------------------------------------------------------------------------


def _mask_user_info(text: str) -> str:
    """Hide what stands between `://` and `@`, and half a password that was cut off."""
    pieces: list[str] = []
    done = 0
    for begin, end in _passwords_in(text):
        if text[begin:end] != MASK:
            pieces += (text[done:begin], MASK)
            done = end
    return "".join((*pieces, text[done:])) if pieces else text


def _passwords_in(text: str) -> Iterator[tuple[int, int]]:
    run_end = unspaced_end = checked_to = 0
    last_at = -1
    mark = text.find("://")
    while mark >= 0:
        start = begin = end = mark + 3
        if start > run_end:
            run_end = _end_of(_RUN, text, start)
            last_at = text.rfind("@", start, run_end)
        user_end = _end_of(_USER, text, start)
        if text.startswith("@", user_end):
            end = user_end  # one word: a key, or a user; hide it
        elif text.startswith(":", user_end) and not _PORT.match(text, user_end + 1):
            begin, end = user_end + 1, last_at
            if end < begin and run_end >= checked_to:  # a quote may be a part of the password
                if run_end >= unspaced_end:
                    unspaced_end = _end_of(_UNSPACED, text, run_end)
                end = text.find("@", run_end, unspaced_end)
                checked_to = unspaced_end if end < 0 else 0
                if end >= 0:
                    end = text.rfind("@", end, _end_of(_RUN, text, end))
            if end < begin and text[start] != "[":
                end = _end_of(_NO_PORT, text, begin)
        if begin < end:
            yield begin, end
        mark = text.find("://", max(start, end))
