"""What the pages show, as JSON: `/api/v1/...`. Only looking; changes go through pages.

    /api/v1/cluster            nodes, totals, task types, the last minutes
    /api/v1/tasks              ?q=search &sort=last|first|runtime &page= &rows=
    /api/v1/tasks/ID           one task with attempts, events and family
    /api/v1/timeline           ?after=version &bars=
    /api/v1/elections          candidates, winners, time to decision
    /api/v1/queues             lengths, rates, consumers, pauses
    /api/v1/history            totals, types and failures of the tables
    /api/v1/history/at         ?clock= or ?time=
    /api/v1/openapi.json       all of this for programs
    /api/v1                    this list

Without login, details are null (arguments, results, texts of errors), and `details` is false.
Answers are objects; what is wrong is `{"error": text}` with a code below 500.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from umbel.dashboard import openapi
from umbel.dashboard.pages import cluster, elections, history, queues, task, tasks, timeline
from umbel.dashboard.pages.page import Page
from umbel.wire.events import encode

if TYPE_CHECKING:
    from umbel.dashboard.site import Site

ROOT = "/api/v1"
PATHS: dict[str, Page] = {
    "/cluster": cluster.PAGE,
    "/tasks": tasks.PAGE,
    "/timeline": timeline.PAGE,
    "/elections": elections.PAGE,
    "/queues": queues.PAGE,
    "/history": history.PAGE,
    "/history/at": history.AT,
    "/tasks/{uuid:path}": task.PAGE,
}


def routes(site: Site) -> list[Route]:
    """The routes of the API."""

    async def listing(request: Request) -> Response:
        return answer({"paths": [ROOT + path for path in PATHS]})

    async def described(request: Request) -> Response:
        return answer(openapi.document(site.settings.prefix))

    made = [Route(ROOT + path, _facts(site, page), methods=["GET"]) for path, page in PATHS.items()]
    return [
        Route(ROOT, listing, methods=["GET"]),
        Route(f"{ROOT}/openapi.json", described, methods=["GET"]),
        *made,
    ]


def answer(content: dict[str, Any], code: int = 200) -> Response:
    """An object as JSON, whatever is in it."""
    return Response(encode(content), code, media_type="application/json")


def _facts(site: Site, page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        params = {**request.query_params, **request.path_params}
        details = site.shows_details(request.state.visit)
        found = await run_in_threadpool(page.facts, site, params, details)
        return answer({key: value for key, value in found.items() if not key.endswith("_html")})

    return respond
