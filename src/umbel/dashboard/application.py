"""The ASGI application: routes, errors, life. Everything comes through the guard first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from umbel.dashboard import api, stream
from umbel.dashboard.gate import Refused
from umbel.dashboard.guard import ASGIApp, Guard, Visit
from umbel.dashboard.identity import is_password
from umbel.dashboard.pages.page import BadQuestion, NotFound, Page
from umbel.dashboard.site import PAGES, Site

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel
    from umbel.dashboard.settings import Settings

logger = logging.getLogger("umbel.dashboard")

Answer = Callable[[Request], Awaitable[Response]]
LOGIN_USER = "admin"
STATIC_AGE_S = 31_536_000


def make(app: Umbel, settings: Settings) -> ASGIApp:
    """A dashboard of an application, with threads that live as long as it serves."""
    return make_for(Site(app, settings))


def make_for(site: Site, *, starts: bool = True) -> ASGIApp:
    """The application of a site; `starts` is whether it also starts and stops the site."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if starts:
            site.start()
        yield
        if starts:
            await run_in_threadpool(site.stop)

    pages = [
        Route(page.path, _page(site, page), methods=["GET"])
        for page in sorted(PAGES.values(), key=lambda page: "{" in page.path)
    ]
    routes = [
        Route("/healthz", _healthz(site), methods=["GET"]),
        Route("/metrics", _metrics(site), methods=["GET"]),
        Route("/static/{name:path}", _static(site), methods=["GET"]),
        Route("/login", _login(site), methods=["GET", "POST"]),
        Route("/logout", _logout(site), methods=["POST"]),
        Route("/audit", _audit(site), methods=["GET"]),
        Route("/actions/{name}", _action(site), methods=["GET", "POST"]),
        Route("/live/{name}", _live(site), methods=["GET"]),
        *api.routes(site),
        *pages,
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _on_http_error(site),
        NotFound: _on_error(site, 404),
        BadQuestion: _on_error(site, 400),
        Refused: _on_refused(site),
        Exception: _on_error(site, 500),
    }
    inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    inner.router.redirect_slashes = False
    return Guard(inner, site.settings, site.sessions)


def visit_of(request: Request) -> Visit:
    """What the guard has found out."""
    visit: Visit = request.state.visit
    return visit


def _html(text: str, code: int = 200) -> Response:
    content = text.encode("utf-8", "backslashreplace")
    return Response(content, code, media_type="text/html; charset=utf-8")


# -- pages -------------------------------------------------------------------------------------


def _page(site: Site, page: Page) -> Answer:
    async def answer(request: Request) -> Response:
        params = {**request.query_params, **request.path_params}
        return _html(await run_in_threadpool(site.page, page, params, visit_of(request)))

    return answer


def _live(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        page = PAGES.get(request.path_params["name"])
        if page is None or not (page.live or page.name == "timeline"):
            raise HTTPException(404, "this page has no live parts")
        if not site.live_clients.has_room(visit_of(request)):
            raise HTTPException(503, "too many browsers have live updates already")
        events = stream.updates(site, page, dict(request.query_params), visit_of(request))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    return answer


def _static(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        found = site.statics.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "there is no such file")
        age = STATIC_AGE_S if request.query_params.get("v") == found.digest else 60
        headers = {"cache-control": f"public, max-age={age}", "etag": f'"{found.digest}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(found.content, media_type=found.media_type, headers=headers)

    return answer


def _healthz(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        """The dashboard serves; whether the broker is there is told, and is no failure of it."""
        state = "connected" if site.live.is_connected else "reconnecting"
        return PlainTextResponse(f"ok\nbroker: {state}\n")

    return answer


def _metrics(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        try:
            from umbel.dashboard import metrics
        except ModuleNotFoundError:
            text = "metrics need the package prometheus_client: pip install 'umbel[metrics]'\n"
            return PlainTextResponse(text, 501)
        return Response(
            await run_in_threadpool(metrics.page, site), media_type=metrics.CONTENT_TYPE
        )

    return answer


def _audit(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        visit = visit_of(request)
        if site.gate.why_not(visit.identity):
            raise Refused("the audit log is for those who may change something: log in")
        entries = site.audit.latest()
        return _html(site.render("audit.html", visit, entries=entries, path=site.audit.path))

    return answer


# -- login -------------------------------------------------------------------------------------


def _login(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        visit, settings = visit_of(request), site.settings
        target = _inside(visit.form.get("next") or request.query_params.get("next", "/"))
        if settings.password is None:
            raise HTTPException(404, "there is no login here: see --password-file")
        if request.method == "GET":
            return _html(site.render("login.html", visit, next=target, error=""))
        admission = site.throttle.admit(visit.identity.address)
        if admission.wait_s > 0:
            seconds = f"{math.ceil(admission.wait_s)}"
            text = f"Too many wrong passwords came from your address: wait {seconds} s."
            answer = _html(site.render("login.html", visit, next=target, error=text), 429)
            answer.headers["retry-after"] = seconds
            return answer
        await asyncio.sleep(admission.delay_s)
        if not is_password(visit.form.get("password", ""), settings.password):
            if admission.delay_s and admission.is_news:
                logger.warning("many wrong passwords came: for a while every login is delayed")
            elif admission.is_news:
                logger.warning("a wrong password came from %s", visit.identity.address)
            text = "That is not the password."
            return _html(site.render("login.html", visit, next=target, error=text), 403)
        site.throttle.succeeded(visit.identity.address)
        site.sessions.end(visit.token)
        visit.renew = site.sessions.begin(LOGIN_USER)
        return RedirectResponse(settings.prefix + target, 303)

    return answer


def _logout(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        visit = visit_of(request)
        site.sessions.end(visit.token)
        visit.renew = site.sessions.new_token()
        return RedirectResponse(f"{site.settings.prefix}/", 303)

    return answer


def _inside(target: str) -> str:
    """A path of ours; whatever else might lead away."""
    is_path = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if is_path and target.isprintable() and len(target) < 2_000 else "/"


# -- actions -----------------------------------------------------------------------------------


def _action(site: Site) -> Answer:
    async def answer(request: Request) -> Response:
        visit, name = visit_of(request), request.path_params["name"]
        given = {**request.query_params, **visit.form}
        if request.method == "GET":
            preview = await run_in_threadpool(site.gate.preview, visit.identity, name, given)
            bare = request.headers.get("x-fragment") == "1"
            template = "_confirm.html" if bare else "confirm.html"
            return _html(site.render(template, visit, preview=preview))
        preview = await run_in_threadpool(site.gate.preview, visit.identity, name, given)
        try:
            said = await run_in_threadpool(site.gate.carry_out, visit.identity, name, given)
            site.notes.add(visit.token, "good", f"{preview.title}: {said}")
        except Refused as exc:
            site.notes.add(visit.token, "bad", f"{preview.title}: {exc}")
        return RedirectResponse(site.settings.prefix + quote(preview.back, safe="/@:"), 303)

    return answer


# -- errors ------------------------------------------------------------------------------------


def _failure(site: Site, request: Request, code: int, text: str) -> Response:
    path = request.url.path
    if path.startswith(("/api/", "/live/")) or request.headers.get("x-fragment") == "1":
        return api.answer({"error": text}, code)
    return _html(site.render("error.html", visit_of(request), code=code, text=text), code)


def _on_http_error(site: Site) -> Callable[[Request, HTTPException], Awaitable[Response]]:
    async def handler(request: Request, exc: HTTPException) -> Response:
        answer = _failure(site, request, exc.status_code, exc.detail)
        answer.headers.update(exc.headers or {})
        return answer

    return handler


def _on_refused(site: Site) -> Callable[[Request, Refused], Awaitable[Response]]:
    async def handler(request: Request, exc: Refused) -> Response:
        return _failure(site, request, exc.code, str(exc))

    return handler


def _on_error(site: Site, code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handler(request: Request, exc: Exception) -> Response:
        if code >= 500:
            logger.error("a page failed: %s", request.url.path, exc_info=exc)
            return _failure(site, request, code, "This page failed; the log has more.")
        return _failure(site, request, code, str(exc))

    return handler
