"""Who somebody is: sessions, the password, and how often it may be tried.

Wrong passwords are limited for each address, which then has to wait. Many of them from many
addresses never lock anybody out, as that would be an attack of its own: they make every try slower,
by at most `DELAY_MAX_S`.

A browser gets a random token in a cookie. The token names its session, which lives here, in memory:
a dashboard that is started anew asks for the password again. Logging in replaces the token. The
form token against forged requests is derived from it, so it needs no memory of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SESSION_S: Final = 12 * 3_600.0
SESSIONS_MAX: Final = 1_000
TOKEN_BYTES: Final = 32
TOKEN_CHARS: Final = 43
# Wrong passwords in `TRIES_S` from one address before it has to wait, and from all of them before
# tries are delayed.
TRIES_MAX: Final = 5
TRIES_ALL_MAX: Final = 50
TRIES_S: Final = 60.0
DELAY_STEP_S: Final = 0.05
DELAY_MAX_S: Final = 2.0
# Whoever has one address of an IPv6 network of this size has all of them.
IPV6_PREFIX: Final = 64
ADDRESSES_MAX: Final = 10_000
NOTES_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class Identity:
    """Whoever sends a request; `user` is empty for who has not logged in."""

    user: str = ""
    address: str = ""

    @property
    def is_known(self) -> bool:
        """Whether somebody has vouched for who this is."""
        return bool(self.user)


@dataclass(slots=True)
class Session:
    """What is remembered of a browser."""

    user: str
    until_s: float


class Sessions:
    """The sessions of one dashboard; safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    @staticmethod
    def new_token() -> str:
        """A name for a browser that nobody can guess."""
        return secrets.token_urlsafe(TOKEN_BYTES)

    @staticmethod
    def is_token(text: str) -> bool:
        """Whether this can be one of ours."""
        return len(text) == TOKEN_CHARS and text.isascii()

    def form_token(self, token: str) -> str:
        """What every form of this browser must carry."""
        return hmac.new(self._key, token.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, token: str, given: str) -> bool:
        """Whether a form comes from a page of ours, in the time that it takes for any text."""
        wanted = self.form_token(token).encode()
        return hmac.compare_digest(wanted, given.encode("utf-8", "replace"))

    def begin(self, user: str) -> str:
        """Somebody has logged in: the token of the new session."""
        token = self.new_token()
        with self._lock:
            self._sessions[token] = Session(user, self._clock() + SESSION_S)
            while len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        return token

    def user(self, token: str) -> str:
        """Who has logged in with this token; empty for nobody."""
        with self._lock:
            found = self._sessions.get(token)
            if found is None:
                return ""
            if found.until_s <= self._clock():
                del self._sessions[token]
                return ""
            return found.user

    def end(self, token: str) -> None:
        """Log out."""
        with self._lock:
            self._sessions.pop(token, None)


class Notes:
    """One-time messages: what became of an action, shown on the next page of that browser."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: OrderedDict[str, deque[tuple[str, str]]] = OrderedDict()

    def add(self, token: str, kind: str, text: str) -> None:
        """Tell this on the next page; `kind` is `good` or `bad`."""
        with self._lock:
            self._notes.setdefault(token, deque(maxlen=NOTES_MAX)).append((kind, text))
            while len(self._notes) > SESSIONS_MAX:
                self._notes.popitem(last=False)

    def take(self, token: str) -> list[tuple[str, str]]:
        """What is to be told, once."""
        with self._lock:
            return list(self._notes.pop(token, ()))


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a password may be tried: not before `wait_s`, or after a delay.

    `is_news`: worth a line in the log, which a flood of tries must not fill.
    """

    wait_s: float = 0.0
    delay_s: float = 0.0
    is_news: bool = True


class Throttle:
    """How often a password may be tried, by address and by all together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: OrderedDict[str, deque[float]] = OrderedDict()
        self._news_at = 0.0
        self._all: deque[float] = deque(maxlen=TRIES_ALL_MAX + round(DELAY_MAX_S / DELAY_STEP_S))

    def admit(self, address: str) -> Admission:
        """Count a try of this address, unless it has to wait."""
        now, key = self._clock(), network_of(address)
        with self._lock:
            mine = self._by_address.setdefault(key, deque(maxlen=TRIES_MAX))
            self._by_address.move_to_end(key)
            while len(self._by_address) > ADDRESSES_MAX:
                self._by_address.popitem(last=False)
            if len(mine) == TRIES_MAX and mine[0] + TRIES_S > now:
                return Admission(wait_s=mine[0] + TRIES_S - now)
            mine.append(now)
            while self._all and self._all[0] + TRIES_S <= now:
                self._all.popleft()
            self._all.append(now)
            excess = max(0, len(self._all) - TRIES_ALL_MAX)
            is_news = not excess or now >= self._news_at
            if excess and is_news:
                self._news_at = now + TRIES_S
            return Admission(delay_s=min(DELAY_MAX_S, excess * DELAY_STEP_S), is_news=is_news)

    def succeeded(self, address: str) -> None:
        """The right one came: forget the wrong ones."""
        with self._lock:
            for at in self._by_address.pop(network_of(address), ()):
                if at in self._all:
                    self._all.remove(at)


def network_of(address: str) -> str:
    """What counts as one address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, IPV6_PREFIX), strict=False))


def is_password(given: str, wanted: str) -> bool:
    """Compare in a time that tells neither length nor beginning."""
    hashes = (
        hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (given, wanted)
    )
    return hmac.compare_digest(*hashes)
