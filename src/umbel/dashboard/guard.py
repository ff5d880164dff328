"""What stands before every request. Nothing behind it can be reached around it.

In this order:
1. the path: the prefix is taken off, where there is one;
2. the host: a name that is not ours is refused (400), against pages that point their name here;
3. who it is: by the session's cookie, or by the proxy's header from a trusted address; and where it
   comes from: the peer, or the last address in X-Forwarded-For that a trusted proxy has added;
4. whatever could change something, that is everything but GET and HEAD: its origin must be this
   host (403), its body small (413) and there in time (408), its form token that of this browser
   (403);
5. looking, where that needs login: a page leads to the login, everything else is refused (401).
   What came through a proxy is not from this machine, whatever its peer is.

Every answer carries the headers that keep a browser from running or loading anything of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from umbel.dashboard.identity import Identity, Sessions
from umbel.dashboard.settings import Settings, host_address, is_loopback

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE: Final = "umbel_dashboard"
FORM_TOKEN: Final = "csrf"  # noqa: S105 - the name of a field
TOKEN_HEADER: Final = "x-csrf-token"  # noqa: S105
BODY_BYTES_MAX: Final = 65_536
BODY_S: Final = 10.0
FIELDS_MAX: Final = 100
USER_CHARS_MAX: Final = 100
SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
METHODS: Final = SAFE_METHODS | {"POST"}
# A request with one of these came through a proxy.
FORWARDING: Final = ("x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-host", "via")
# Reachable by anybody who can connect: what the login page needs, and a sign of life.
OPEN_PATHS: Final = ("/static/", "/login", "/healthz")

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Without a referrer browsers send no origin with forms either.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(slots=True)
class Visit:
    """What is known of a request: `scope["state"]["visit"]`."""

    identity: Identity
    token: str
    is_session: bool = False  # whether the session of the token vouches for the identity
    is_local: bool = True  # whether it came from this machine, as far as can be known
    form: dict[str, str] = field(default_factory=dict)
    renew: str | None = None  # the token that the browser is to have from now on


class _Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Guard:
    """See the module's text."""

    def __init__(
        self, app: ASGIApp, settings: Settings, sessions: Sessions, body_s: float = BODY_S
    ) -> None:
        self._app, self._settings, self._sessions = app, settings, sessions
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks anything else
        headers = Headers(scope=scope)
        visit = self._visit(scope, headers)
        scope.setdefault("state", {})["visit"] = visit

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._finish(scope, visit, MutableHeaders(scope=message))
            await send(message)

        try:
            answer = await self._check(scope, receive, headers, visit)
        except _Refused as exc:
            answer = PlainTextResponse(f"{exc}\n", exc.code)
        await (answer or self._app)(scope, receive, send_guarded)

    # -- the checks, in their order ----------------------------------------------------

    async def _check(
        self, scope: Scope, receive: Receive, headers: Headers, visit: Visit
    ) -> Response | None:
        answer = self._take_prefix_off(scope)
        if answer is not None:
            return answer
        method, host = scope["method"], headers.get("host", "")
        if method not in METHODS:
            return PlainTextResponse("only GET, HEAD and POST\n", 405, {"allow": "GET, HEAD, POST"})
        if not self._settings.allows_host(host):
            raise _Refused(400, "this host name is not served here: see --allow-host")
        if method not in SAFE_METHODS:
            self._check_origin(headers, host)
            visit.form = await self._form(receive, headers)
            given = headers.get(TOKEN_HEADER) or visit.form.get(FORM_TOKEN, "")
            if not visit.token or not self._sessions.is_form_token(visit.token, given):
                raise _Refused(403, "the form is too old, or not ours: load the page again")
        path: str = scope["path"]
        if visit.identity.is_known or path.startswith(OPEN_PATHS):
            return None
        if self._settings.reading_needs_login or not visit.is_local:
            return self._to_login(scope)
        return None

    async def _form(self, receive: Receive, headers: Headers) -> dict[str, str]:
        try:
            async with asyncio.timeout(self._body_s):
                return await _form(receive, headers)
        except TimeoutError:
            raise _Refused(408, "the body of the request did not come in time") from None

    def _take_prefix_off(self, scope: Scope) -> Response | None:
        prefix, path = self._settings.prefix, scope["path"]
        if not prefix:
            return None
        if path == prefix or path.startswith(f"{prefix}/"):
            scope["path"] = path[len(prefix) :] or "/"
        elif path == "/":
            return RedirectResponse(f"{prefix}/", 307)
        return None

    def _check_origin(self, headers: Headers, host: str) -> None:
        """A form of another site is refused before it is read."""
        site = headers.get("sec-fetch-site", "same-origin")
        origin = headers.get("origin", "")
        try:
            place = urlsplit(origin).netloc.lower()
        except ValueError:
            place = ""
        if site != "same-origin" or not host or place != host.strip().lower():
            raise _Refused(403, "this comes from another site: nothing was done")

    def _to_login(self, scope: Scope) -> Response:
        path: str = scope["path"]
        if not self._settings.has_login:
            raise _Refused(
                403,
                "this came through a proxy, and a dashboard without login is for its own machine "
                "only: start it with --password-file, or with --proxy-header and --proxy-address",
            )
        if scope["method"] != "GET" or path.startswith(("/api/", "/live/", "/metrics")):
            raise _Refused(401, "log in first")
        query = scope.get("query_string", b"").decode("latin-1")
        target = path + (f"?{query}" if query else "")
        return RedirectResponse(f"{self._settings.prefix}/login?next={quote(target)}", 303)

    # -- who it is ---------------------------------------------------------------------

    def _visit(self, scope: Scope, headers: Headers) -> Visit:
        address, is_local = self._origin(scope, headers)
        token = _cookie(headers.get("cookie", ""))
        header, named = self._settings.proxy_header, ""
        if header is not None and self._settings.is_proxy(_peer(scope)):
            values = headers.getlist(header)
            # Of two, one is the client's.
            named = _printable(values[0]) if len(values) == 1 else ""
        user = named or (self._sessions.user(token) if token else "")
        is_session = bool(user) and not named
        return Visit(Identity(user, address), token, is_session=is_session, is_local=is_local)

    def _origin(self, scope: Scope, headers: Headers) -> tuple[str, bool]:
        """The address that a request comes from, and whether that is this machine."""
        peer = _peer(scope)
        if not any(name in headers for name in FORWARDING):
            return peer, True  # nobody else can connect to a dashboard that needs no login
        if not self._settings.is_proxy(peer):
            return peer, False
        # Each proxy adds whom it was asked by at the end; what is before that anybody may write.
        forwarded = ",".join(headers.getlist("x-forwarded-for"))
        hops = [host_address(hop) for hop in forwarded.split(",")]
        found = next((hop for hop in reversed(hops) if not self._settings.is_proxy(hop)), "")
        return found or peer, is_loopback(found)

    def _finish(self, scope: Scope, visit: Visit, headers: MutableHeaders) -> None:
        for name, value in HEADERS.items():
            headers.setdefault(name, value)
        headers.setdefault("cache-control", "no-store")
        if visit.renew is None:
            return
        secure = "; Secure" if self._is_https(scope) else ""
        headers.append(
            "set-cookie",
            f"{COOKIE}={visit.renew}; Path={self._settings.prefix or '/'}; "
            f"HttpOnly; SameSite=Strict{secure}",
        )

    def _is_https(self, scope: Scope) -> bool:
        forwarded = Headers(scope=scope).get("x-forwarded-proto", "")
        return scope.get("scheme") == "https" or (
            forwarded == "https" and self._settings.is_proxy(_peer(scope))
        )


def _peer(scope: Scope) -> str:
    """Who has connected."""
    return str((scope.get("client") or ("",))[0])


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None and Sessions.is_token(found.value) else ""


def _printable(text: str) -> str:
    return text.strip()[:USER_CHARS_MAX] if text.isprintable() else ""


async def _form(receive: Receive, headers: Headers) -> dict[str, str]:
    """The fields of a small form; the last of several of one name."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Refused(400, "the request was cut off")
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            raise _Refused(413, f"more than {BODY_BYTES_MAX} bytes")
        if not message.get("more_body"):
            break
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not body:
        return {}
    if kind != "application/x-www-form-urlencoded":
        raise _Refused(415, "send forms as application/x-www-form-urlencoded")
    try:
        fields = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError:
        raise _Refused(400, "the form can not be read") from None
    return {name: values[-1] for name, values in fields.items()}
