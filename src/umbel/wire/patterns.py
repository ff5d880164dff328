"""Which nodes a pattern means: globs, and regular expressions that can not run away.

Whoever can reach the broker can send a pattern, and every node has to decide on it at once.
Python's own matcher may take longer than the universe for a pattern of twenty characters. So the
expressions are read here and run as a set of states, in time proportional to states times
characters of the name, both of which are bounded.

The language is a part of Python's: literals, `.`, classes, groups, alternatives, repetitions
(greedy and lazy mean the same where only the fact of a match counts), `^`, `$`, `\\A`, `\\Z` and
the class escapes. As in Python a match begins with the name and need not reach its end. What is not
in the language (references, looking around, flags) is refused by name, never guessed at.
"""

from __future__ import annotations

import fnmatch
import re
from functools import lru_cache
from typing import Any, Final

from umbel.wire.limits import UNKNOWN_MESSAGE, Refusal
from umbel.wire.reprs import safe_repr

GLOB: Final = "glob"
PCRE: Final = "pcre"
MATCHERS: Final = (GLOB, PCRE)

PATTERN_CHARS_MAX: Final = 250
NAME_CHARS_MAX: Final = 1_000
STATES_MAX: Final = 1_000
_GROUPS_DEEP_MAX: Final = 50

_ESCAPED_CLASSES: Final = frozenset("dDwWsS")
_ESCAPED_CHARS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_COUNT: Final = re.compile(r"\{(\d{0,5})(?:(,)(\d{0,5}))?\}")
_GROUP_NAME: Final = re.compile(r"\?P<[A-Za-z_]\w*>")
# Python warns that these may come to mean operations on sets.
_DOUBTFUL_IN_CLASS: Final = ("[", "--", "&&", "~~", "||")


def check_pattern(pattern: str, matcher: str) -> None:
    """Refuse a pattern that can not be matched, and a matcher that nobody knows."""
    if matcher not in MATCHERS:
        raise _refusal(pattern, f"unknown matcher {safe_repr(matcher, 40)}: choose glob or pcre")
    if len(pattern) > PATTERN_CHARS_MAX:
        raise _refusal(pattern, f"it has more than {PATTERN_CHARS_MAX} characters")
    if matcher == PCRE:
        _expression(pattern)


def matches(name: str, pattern: str, matcher: str) -> bool:
    """Whether `name` is meant; raises `Refusal` for what `check_pattern` refuses."""
    check_pattern(pattern, matcher)
    if len(name) > NAME_CHARS_MAX:
        return False
    if matcher == GLOB:
        return fnmatch.fnmatchcase(name, pattern)
    return _expression(pattern).matches(name)


@lru_cache(maxsize=64)
def _expression(pattern: str) -> _Expression:
    return _Expression(_Parser(pattern).whole())


# -- running ---------------------------------------------------------------------------------

# A state is ("eat", test, next), ("at", where, next), ("split", (next, ...)) or ("found",).
_State = tuple[Any, ...]


class _Expression:
    """A parsed expression as a table of states; `_first` is where a match begins."""

    def __init__(self, node: _Node) -> None:
        self._states: list[_State] = []
        self._built = 0
        self._first = self._build(node, self._add(("found",)))

    def _add(self, state: _State) -> int:
        self._states.append(state)
        return len(self._states) - 1

    def _build(self, node: _Node, then: int) -> int:
        """The state that begins with `node` and goes on with the state `then`."""
        self._built += 1
        if self._built > STATES_MAX:
            raise _refusal("", f"written out it has more than {STATES_MAX} parts: repeat less")
        kind = node[0]
        if kind in ("eat", "at"):
            return self._add((kind, node[1], then))
        if kind == "all":
            for part in reversed(node[1]):
                then = self._build(part, then)
            return then
        if kind == "any":
            return self._add(("split", tuple(self._build(branch, then) for branch in node[1])))
        _, inner, least, most = node
        return self._repeat(inner, least, most, then)

    def _repeat(self, inner: _Node, least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self._add(())
            self._states[loop] = ("split", (self._build(inner, loop), then))
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._add(("split", (self._build(inner, then), end)))
        for _ in range(least):
            then = self._build(inner, then)
        return then

    def matches(self, name: str) -> bool:
        current = {self._first}
        for position in range(len(name) + 1):
            waiting = self._reachable(current, name, position)
            if waiting is None:
                return True
            if not waiting or position == len(name):
                return False
            char = name[position]
            current = {state[2] for state in waiting if _eats(state[1], char)}
        return False

    def _reachable(self, states: set[int], name: str, position: int) -> list[_State] | None:
        """The states that want a character; None when the match is found."""
        seen, left, waiting = set(states), list(states), []
        while left:
            state = self._states[left.pop()]
            kind = state[0]
            if kind == "found":
                return None
            if kind == "eat":
                waiting.append(state)
                continue
            if kind == "at":
                following = (state[2],) if _is_at(state[1], name, position) else ()
            else:
                following = state[1]
            for number in following:
                if number not in seen:
                    seen.add(number)
                    left.append(number)
        return waiting


def _eats(test: Any, char: str) -> bool:
    return test == char if isinstance(test, str) else test.match(char) is not None


def _is_at(where: str, name: str, position: int) -> bool:
    if where == "start":
        return position == 0
    left = len(name) - position
    return left == 0 or (where == "line-end" and left == 1 and name[-1] == "\n")


# -- reading ---------------------------------------------------------------------------------

# ("eat", character or compiled class), ("at", where), ("all", [nodes]), ("any", [nodes]) or
# ("repeat", node, least, most or None).
_Node = tuple[Any, ...]


class _Parser:
    """Reads one expression from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error("a ) too many")
        return node

    def _error(self, why: str) -> Refusal:
        return _refusal(self._pattern, f"{why} at character {self._at + 1}")

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _takes(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _alternatives(self) -> _Node:
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else ("any", branches)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._pattern) and self._next() not in "|)":
            node = self._atom()
            parts.append(self._repeated(node))
        return ("all", parts)

    def _repeated(self, node: _Node) -> _Node:
        count = self._count()
        if count is None:
            return node
        if node[0] == "at":
            raise self._error("a repetition of nothing")
        self._takes("?")
        if self._next() == "+" or self._count() is not None:
            raise self._error("a repetition of a repetition")
        return ("repeat", node, *count)

    def _count(self) -> tuple[int, int | None] | None:
        """How often; None where no repetition stands."""
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._next())
        if simple is not None:
            self._at += 1
            return simple
        found = _COUNT.match(self._pattern, self._at)
        if found is None or found.group() == "{}":
            return None
        self._at = found.end()
        least = int(found[1] or 0)
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self._error("a repetition whose bounds are the wrong way round")
        return least, most

    def _atom(self) -> _Node:
        char = self._next()
        if char in "*+?" or (char == "{" and self._begins_count()):
            raise self._error("nothing to repeat")
        self._at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return ("eat", self._class())
        if char == "\\":
            return self._escape()
        if char == ".":
            return ("eat", _ANY)
        if char in "^$":
            return ("at", "start" if char == "^" else "line-end")
        return ("eat", char)

    def _begins_count(self) -> bool:
        found = _COUNT.match(self._pattern, self._at)
        return found is not None and found.group() != "{}"

    def _group(self) -> _Node:
        if not self._takes("?:"):
            named = _GROUP_NAME.match(self._pattern, self._at)
            if named is not None:
                self._at = named.end()
            elif self._next() == "?":
                raise self._error("only plain groups are known here: ( or (?: or (?P<name>")
        self._depth += 1
        if self._depth > _GROUPS_DEEP_MAX:
            raise self._error("too many groups inside each other")
        node = self._alternatives()
        self._depth -= 1
        if not self._takes(")"):
            raise self._error("a ( without its )")
        return node

    def _escape(self) -> _Node:
        char = self._next()
        self._at += 1
        if char in ("A", "Z"):
            return ("at", "start" if char == "A" else "end")
        if char in _ESCAPED_CLASSES:
            return ("eat", re.compile(f"\\{char}"))
        if char in _ESCAPED_CHARS:
            return ("eat", _ESCAPED_CHARS[char])
        if not char or (char.isascii() and char.isalnum()):
            raise self._error(f"\\{char} is not known here")
        return ("eat", char)

    def _class(self) -> re.Pattern[str]:
        start = self._at
        self._takes("^")
        self._takes("]")  # the first one stands for itself
        while self._next() not in ("]", ""):
            if self._takes("\\") and self._next() in frozenset("bBAZNuUx0123456789"):
                raise self._error(f"\\{self._next()} is not known in a class here")
            self._at += 1
        if not self._takes("]"):
            raise self._error("a [ without its ]")
        text = self._pattern[start : self._at - 1]
        if any(doubtful in text for doubtful in _DOUBTFUL_IN_CLASS):
            raise self._error("a class with [, --, &&, ~~ or || in it")
        try:
            return re.compile(f"[{text}]")
        except re.error as exc:
            raise self._error(f"a class that is none ({exc.msg})") from None


_ANY: Final = re.compile(".")


def _refusal(pattern: str, why: str) -> Refusal:
    shown = f" {safe_repr(pattern, 80)}" if pattern else ""
    return Refusal(UNKNOWN_MESSAGE, f"the pattern{shown} can not be matched: {why}")
