"""A small ASGI client: sends exactly what it is told, paths included, and keeps cookies."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import unquote_to_bytes, urlencode

from umbel.dashboard.guard import ASGIApp
from umbel.dashboard.site import Site

_clocks = itertools.count(100)
_TOKEN = re.compile(r'name="csrf" value="([0-9a-f]+)"')


@dataclass
class Answer:
    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, app: ASGIApp, host: str = "127.0.0.1:5577", address: str = "127.0.0.1"):
        self.app, self.host, self.address = app, host, address
        self.cookies: dict[str, str] = {}

    def get(self, target: str, **headers: str) -> Answer:
        return self.send("GET", target, headers=headers)

    def post(self, target: str, fields: Mapping[str, str] | None = None, **headers: str) -> Answer:
        """A form, from a page of this site unless the headers say otherwise."""
        sent = {"origin": f"http://{self.host}", **headers}
        sent.setdefault("content-type", "application/x-www-form-urlencoded")
        return self.send("POST", target, urlencode(fields or {}).encode(), sent)

    def send(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        return asyncio.run(self._send(method, target, body, headers or {}))

    def token(self, target: str = "/") -> str:
        """The form token of this browser."""
        found = _TOKEN.search(self.get(target).text)
        assert found is not None, f"no form on {target}"
        return found[1]

    def log_in(self, password: str) -> Answer:
        return self.post("/login", {"csrf": self.token("/login"), "password": password})

    async def _send(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        path, _, query = target.partition("?")
        sent = {"host": self.host, **{k.replace("_", "-"): v for k, v in headers.items()}}
        if self.cookies:
            sent["cookie"] = "; ".join(f"{k}={v}" for k, v in self.cookies.items())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path.encode(),
            "query_string": query.encode("latin-1", "replace"),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in sent.items()],
            "client": (self.address, 40000),
            "server": ("127.0.0.1", 5577),
        }
        inbox = [{"type": "http.request", "body": body, "more_body": False}]
        out: list[Any] = []

        async def receive() -> Any:
            return inbox.pop(0) if inbox else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            out.append(message)

        try:
            await self.app(scope, receive, send)
        except Exception:
            if not out:  # a server logs what comes after its answer
                raise
        start = out[0]
        told = [(k.decode(), v.decode("latin-1")) for k, v in start["headers"]]
        for name, value in told:
            if name == "set-cookie":
                for key, one in SimpleCookie(value).items():
                    self.cookies[key] = one.value
        content = b"".join(message.get("body", b"") for message in out[1:])
        return Answer(start["status"], dict(told), content)


class Feed:
    """Events as workers send them."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def event(self, kind: str, hostname: str = "w1@host", **fields: Any) -> None:
        now = time.time()
        event = {
            "type": kind, "hostname": hostname, "timestamp": now, "clock": next(_clocks),
            "pid": 7, "utcoffset": 0, "local_received": now,
        }  # fmt: skip
        self.site.live.event({**event, **fields})

    def worker(self, hostname: str = "w1@host", **fields: Any) -> None:
        figures = {"freq": 2.0, "active": 1, "processed": 5, "loadavg": [0.5, 0.4, 0.3]}
        software = {"sw_ident": "py-umbel", "sw_ver": "0.1.0", "sw_sys": "Linux"}
        self.event("worker-online", hostname, **{**figures, **software, **fields})

    def task(
        self, uuid: str, name: str = "shop.charge", state: str = "SUCCESS",
        hostname: str = "w1@host", **fields: Any,
    ) -> None:  # fmt: skip
        """The life of a task, as far as `state`."""
        call = {"name": name, "args": "(7,)", "kwargs": "{}", "retries": 0}
        known = {key: fields.pop(key) for key in list(fields) if key in (*call, "parent_id")}
        self.event(
            "task-sent", "gen@client", uuid=uuid, queue="celery", clock=0,
            timestamp=time.time() - 1, **{**call, **known},
        )  # fmt: skip
        if state == "PENDING":
            return
        self.event("task-received", hostname, uuid=uuid, **{**call, **known})
        if state in ("RECEIVED", "REVOKED"):
            if state == "REVOKED":
                self.event("task-revoked", hostname, uuid=uuid, terminated=False, **fields)
            return
        self.event("task-started", hostname, uuid=uuid)
        if state == "SUCCESS":
            told = {"result": "'ok'", "runtime": 0.25}
            self.event("task-succeeded", hostname, uuid=uuid, **{**told, **fields})
        elif state == "FAILURE":
            told = {"exception": "ValueError('no')", "traceback": "Traceback\n  File x"}
            self.event("task-failed", hostname, uuid=uuid, **{**told, **fields})
