"""Who gets in, and what is refused before anything is done."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from tests.unit.dashboard.client import Client, Feed
from tests.unit.dashboard.conftest import PASSWORD
from umbel.dashboard import identity
from umbel.dashboard.application import make_for
from umbel.dashboard.guard import Guard
from umbel.dashboard.settings import Settings, read_network, read_password
from umbel.dashboard.site import Site
from umbel.exceptions import ImproperlyConfigured

EVIL = "<script>alert(1)</script>"


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_nobody_else_is_served_without_authentication(host: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="refusing to serve"):
        Settings(host=host)
    assert Settings(host=host, password=PASSWORD).reading_needs_login


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_loopback_needs_no_password(host: str) -> None:
    assert not Settings(host=host).reading_needs_login


def test_privacy_needs_a_login() -> None:
    with pytest.raises(ImproperlyConfigured, match="nobody can log in"):
        Settings(private=True)
    assert Settings(private=True, password=PASSWORD).reading_needs_login


def test_a_proxy_header_needs_addresses() -> None:
    with pytest.raises(ImproperlyConfigured, match="--proxy-address"):
        Settings(proxy_header="X-Forwarded-User")
    with pytest.raises(ImproperlyConfigured, match="no address"):
        read_network("somewhere")


@pytest.mark.parametrize("prefix", ["umbel", "/umbel/", "/a b", "//x", "/<x>"])
def test_a_prefix_is_a_plain_path(prefix: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="prefix"):
        Settings(prefix=prefix)


def test_the_password_comes_from_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{PASSWORD}\nmore\n")
    path.chmod(0o600)
    assert read_password(path) == PASSWORD
    path.chmod(0o644)
    with pytest.raises(ImproperlyConfigured, match="chmod 600"):
        read_password(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ImproperlyConfigured, match="no password"):
        read_password(path)
    with pytest.raises(ImproperlyConfigured, match="cannot read"):
        read_password(tmp_path / "none")


# -- headers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/tasks", "/nowhere", "/static/app.js", "/api/v1/cluster"])
def test_every_answer_forbids_what_is_not_ours(client: Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in policy


def test_pages_have_no_inline_script_or_style(logged_in: Client, feed: Feed) -> None:
    feed.worker()
    feed.task("t1")
    for path in ("/", "/tasks", "/tasks/t1", "/timeline", "/elections", "/queues", "/history"):
        text = logged_in.get(path).text
        assert "<script>" not in text
        assert "<style" not in text
        assert " style=" not in text
        assert " onclick=" not in text


def test_the_cookie_is_for_this_site_alone(client: Client) -> None:
    cookie = client.get("/").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "Secure" not in cookie  # over plain http the browser would not keep it


def test_an_unknown_host_name_is_refused(site: Site) -> None:
    app = make_for(site, starts=False)
    assert Client(app, host="evil.example").get("/").code == 400
    assert Client(app, host="localhost:5577").get("/").code == 200
    assert Client(app, host="[::1]:5577").get("/").code == 200


# -- changes -----------------------------------------------------------------------------------


def test_a_change_without_login_is_refused(client: Client, site: Site) -> None:
    token = client.token("/login")
    answer = client.post("/actions/pause", {"csrf": token, "queue": "celery"})
    assert answer.code == 403
    assert client.get("/actions/pause?queue=celery").code == 403
    assert site.audit.latest() == []


def test_a_forged_form_token_is_refused(logged_in: Client, site: Site) -> None:
    for token in ("", "0" * 64, "x", "\udcff".encode("utf-8", "replace").decode()):
        answer = logged_in.post("/actions/pause", {"csrf": token, "queue": "celery"})
        assert answer.code == 403
    other = Client(logged_in.app)
    stolen = other.token("/login")  # right for another browser
    assert logged_in.post("/actions/pause", {"csrf": stolen, "queue": "q"}).code == 403
    assert site.audit.latest() == []


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://[bad"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(
    logged_in: Client, site: Site, headers: dict[str, str]
) -> None:
    token = logged_in.token()
    answer = logged_in.post("/actions/pause", {"csrf": token, "queue": "celery"}, **headers)
    assert answer.code == 403
    assert site.audit.latest() == []


def test_other_methods_and_huge_bodies_are_refused(logged_in: Client) -> None:
    assert logged_in.send("PUT", "/").code == 405
    assert logged_in.send("DELETE", "/tasks/x").code == 405
    origin = {"origin": f"http://{logged_in.host}"}
    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert logged_in.send("POST", "/login", b"a" * 70_000, {**origin, **kind}).code == 413
    assert logged_in.send("POST", "/login", b"{}", {**origin}).code == 415
    many = b"&".join(b"a=1" for _ in range(200))
    assert logged_in.send("POST", "/login", many, {**origin, **kind}).code == 400


def test_a_body_that_does_not_come_is_not_waited_for(site: Site) -> None:
    guard = Guard(make_for(site, starts=False), site.settings, site.sessions, body_s=0.05)
    sent: list[Any] = []
    origin = (b"origin", b"http://127.0.0.1")
    scope = {
        "type": "http", "method": "POST", "path": "/login", "query_string": b"", "scheme": "http",
        "client": ("127.0.0.1", 1), "headers": [(b"host", b"127.0.0.1"), origin],
    }  # fmt: skip

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(guard(scope, never, send), 5))
    assert sent[0]["status"] == 408


# -- login -------------------------------------------------------------------------------------


def test_logging_in_allows_changes_and_logging_out_ends_it(client: Client, site: Site) -> None:
    before = client.cookies.get("umbel_dashboard")
    answer = client.log_in(PASSWORD)
    assert answer.code == 303
    assert answer.headers["location"] == "/"
    token = client.cookies["umbel_dashboard"]
    assert token != before  # a token planted before the login is worth nothing
    assert site.sessions.user(token) == "admin"
    assert client.get("/actions/pause?queue=celery").code == 200
    assert client.post("/logout", {"csrf": client.token()}).code == 303
    assert site.sessions.user(token) == ""
    assert client.get("/actions/pause?queue=celery").code == 403


def test_wrong_passwords_are_slowed_down(client: Client, site: Site) -> None:
    for _ in range(identity.TRIES_MAX):
        assert client.log_in("wrong").code == 403
    answer = client.log_in(PASSWORD)
    assert answer.code == 429
    assert int(answer.headers["retry-after"]) > 0
    elsewhere = Client(client.app, address="127.0.0.9")
    assert elsewhere.log_in(PASSWORD).code == 303


def test_many_tries_from_many_addresses_delay_and_never_lock_out() -> None:
    now = [0.0]
    throttle = identity.Throttle(clock=lambda: now[0])
    for number in range(identity.TRIES_ALL_MAX):
        assert throttle.admit(f"10.0.0.{number}") == identity.Admission()
    delays = [throttle.admit(f"10.1.{number // 200}.{number % 200}") for number in range(5_000)]
    assert not any(one.wait_s for one in delays)
    assert 0 < delays[0].delay_s < delays[-1].delay_s == identity.DELAY_MAX_S
    assert [one.is_news for one in delays].count(True) == 1  # the log is not filled
    now[0] = identity.TRIES_S + 1
    assert throttle.admit("10.9.9.9").delay_s == 0


def test_tries_of_one_address_are_forgotten_in_time() -> None:
    now = [0.0]
    throttle = identity.Throttle(clock=lambda: now[0])
    for _ in range(identity.TRIES_MAX):
        assert throttle.admit("10.0.0.1").wait_s == 0
    assert throttle.admit("10.0.0.1").wait_s == identity.TRIES_S
    assert throttle.admit("10.0.0.2").wait_s == 0
    now[0] = identity.TRIES_S
    assert throttle.admit("10.0.0.1").wait_s == 0


def test_all_addresses_of_an_ipv6_network_are_one() -> None:
    throttle = identity.Throttle()
    for number in range(identity.TRIES_MAX):
        assert throttle.admit(f"2001:db8::{number}").wait_s == 0
    assert throttle.admit("2001:db8::ffff:ffff").wait_s > 0
    assert throttle.admit("2001:db8:0:1::").wait_s == 0
    assert identity.network_of("::ffff:192.0.2.1") == identity.network_of("192.0.2.1")


# -- proxies -----------------------------------------------------------------------------------


def test_what_a_proxy_forwards_needs_a_login_also_on_loopback(
    make_site: Callable[..., Site],
) -> None:
    forwarded = {"x_forwarded_for": "192.0.2.7"}
    client = Client(make_for(make_site(password=PASSWORD), starts=False))
    assert client.get("/tasks").code == 200
    assert client.get("/tasks", **forwarded).code == 303
    assert client.get("/api/v1/tasks", via="1.1 proxy").code == 401
    assert client.get("/healthz", **forwarded).code == 200
    client.log_in(PASSWORD)
    assert client.get("/tasks", **forwarded).code == 200
    open_one = Client(make_for(make_site(public_details=True), starts=False))
    answer = open_one.get("/tasks", **forwarded)
    assert answer.code == 403
    assert "--password-file" in answer.text


def test_a_trusted_proxy_names_the_address_and_nobody_else_does(
    make_site: Callable[..., Site],
) -> None:
    proxies = (read_network("127.0.0.1"), read_network("10.0.0.0/8"))
    site = make_site(password=PASSWORD, proxy_addresses=proxies)
    app = make_for(site, starts=False)

    def seen(peer: str, forwarded: str) -> str:
        visits = []

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            visits.append(scope["state"]["visit"])
            await PlainTextResponse("")(scope, receive, send)

        guard = Guard(inner, site.settings, site.sessions)
        Client(guard, address=peer).get("/healthz", x_forwarded_for=forwarded)
        return str(visits[0].identity.address)

    assert seen("127.0.0.1", "192.0.2.7") == "192.0.2.7"
    assert seen("127.0.0.1", "1.1.1.1, 192.0.2.7, 10.1.1.1") == "192.0.2.7"  # the first was forged
    assert seen("127.0.0.1", "[2001:db8::1]:4711") == "2001:db8::1"
    assert seen("127.0.0.1", "nonsense") == "127.0.0.1"
    assert seen("192.0.2.9", "192.0.2.7") == "192.0.2.9"
    # So one client behind the proxy locks out itself and not the others.
    for _ in range(identity.TRIES_MAX):
        assert log_in_through(app, "192.0.2.7", "wrong") == 403
    assert log_in_through(app, "192.0.2.7", PASSWORD) == 429
    assert log_in_through(app, "192.0.2.8", PASSWORD) == 303


def test_a_header_that_came_twice_is_not_taken_for_the_proxys(
    make_site: Callable[..., Site],
) -> None:
    """Some proxies add a header behind the one that the client has sent."""
    site = make_site(
        proxy_header="X-Forwarded-User",
        proxy_addresses=(read_network("127.0.0.1"), read_network("10.0.0.1")),
    )
    visits = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        visits.append(scope["state"]["visit"])

    async def nothing(*_: Any) -> Any: ...

    def ask(*headers: tuple[str, str]) -> Any:
        sent = [(name.encode(), value.encode()) for name, value in headers]
        scope = {
            "type": "http", "method": "GET", "path": "/healthz", "query_string": b"",
            "client": ("127.0.0.1", 1), "headers": [(b"host", b"127.0.0.1"), *sent],
        }  # fmt: skip
        guard = Guard(inner, site.settings, site.sessions)
        asyncio.run(guard(scope, nothing, nothing))
        return visits[-1].identity

    user, forwarded = "x-forwarded-user", "x-forwarded-for"
    assert ask((user, "ada"), (forwarded, "192.0.2.7")).user == "ada"
    assert ask((user, "root"), (user, "ada"), (forwarded, "192.0.2.7")).user == ""
    found = ask((forwarded, "1.1.1.1"), (forwarded, "192.0.2.7, 10.0.0.1"))
    assert found.address == "192.0.2.7"


def log_in_through(app: Any, address: str, password: str) -> int:
    client = Client(app)
    form = {"csrf": client.token("/login"), "password": password}
    return client.post("/login", form, x_forwarded_for=address).code


def test_sessions_end_and_are_bounded() -> None:
    now = [0.0]
    sessions = identity.Sessions(clock=lambda: now[0])
    first = sessions.begin("a")
    assert sessions.user(first) == "a"
    now[0] = identity.SESSION_S + 1
    assert sessions.user(first) == ""
    tokens = [sessions.begin("a") for _ in range(identity.SESSIONS_MAX + 1)]
    assert sessions.user(tokens[0]) == ""
    assert sessions.user(tokens[-1]) == "a"


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example", "/\\evil", "x", "/\n"]
)
def test_a_login_leads_nowhere_else(client: Client, target: str) -> None:
    fields = {"csrf": client.token("/login"), "password": PASSWORD, "next": target}
    assert client.post("/login", fields).headers["location"] == "/"


def test_a_proxy_names_users_from_its_address_only(make_site: Callable[..., Site]) -> None:
    site = make_site(proxy_header="X-Forwarded-User", proxy_addresses=(read_network("10.0.0.0/8"),))
    app = make_for(site, starts=False)
    header = {"x_forwarded_user": "ada"}
    assert Client(app, address="10.1.2.3").get("/actions/pause?queue=q", **header).code == 200
    assert Client(app, address="10.1.2.3").get("/actions/pause?queue=q").code == 403
    assert Client(app, address="192.0.2.1").get("/actions/pause?queue=q", **header).code == 403


def test_beyond_loopback_nothing_is_shown_without_login(make_site: Callable[..., Site]) -> None:
    site = make_site(host="0.0.0.0", password=PASSWORD)
    client = Client(make_for(site, starts=False), host="umbel.example")
    answer = client.get("/tasks?q=state:failed")
    assert answer.code == 303
    assert answer.headers["location"] == "/login?next=/tasks%3Fq%3Dstate%3Afailed"
    for path in ("/api/v1/cluster", "/live/cluster", "/metrics"):
        assert client.get(path).code == 401
    assert client.get("/healthz").code == 200
    assert client.get("/static/style.css").code == 200
    client.log_in(PASSWORD)
    assert client.get("/tasks").code == 200


def test_without_a_password_everything_is_read_only(make_site: Callable[..., Site]) -> None:
    client = Client(make_for(make_site(), starts=False))
    assert "read-only" in client.get("/").text
    assert client.get("/login").code == 404
    assert client.get("/actions/pause?queue=q").code == 403


# -- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/static/../settings.py",
        "/static/..%2f..%2fsettings.py",
        "/static/%2e%2e/settings.py",
        "/static//etc/passwd",
        "/static/..%5c..%5csettings.py",
        "/static/app.js%00.css",
        "/static/",
        "/../../etc/passwd",
    ],
)
def test_no_path_leaves_the_static_files(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.code == 404
    assert "root:" not in answer.text
    assert "import" not in answer.text.lower() or answer.headers["content-type"][:9] == "text/html"


def test_a_prefix_is_taken_off_and_put_before_every_link(make_site: Callable[..., Site]) -> None:
    site = make_site(prefix="/umbel", password=PASSWORD)
    client = Client(make_for(site, starts=False))
    assert client.get("/").headers["location"] == "/umbel/"
    text = client.get("/umbel/").text
    assert 'href="/umbel/tasks"' in text
    assert 'href="/tasks"' not in text
    assert "Path=/umbel;" in client.get("/umbel/login").headers.get("set-cookie", "Path=/umbel;")
    assert client.get("/umbel/static/app.js").code == 200
    assert client.get("/umbelx/tasks").code == 404


# -- what others wrote -------------------------------------------------------------------------


def test_html_of_others_is_text(logged_in: Client, feed: Feed) -> None:
    feed.worker(f"{EVIL}@host")
    feed.task("evil", EVIL, "FAILURE", f"{EVIL}@host", args=f"({EVIL!r},)", kwargs=EVIL,
              exception=f"ValueError({EVIL!r})", traceback=f"Traceback\n{EVIL}")  # fmt: skip
    feed.event("worker-elect", f"{EVIL}@host", id=EVIL, topic=EVIL, action=None, cver=2, inc=1)
    feed.event("worker-elected", f"{EVIL}@host", id=EVIL, winner=EVIL)
    feed.task(EVIL)
    for path in ("/", "/tasks", "/tasks/evil", "/elections", "/queues", "/timeline"):
        text = logged_in.get(path).text
        assert EVIL not in text, path
        assert "alert(1)" not in text or "&lt;script&gt;" in text
    assert "&lt;script&gt;alert(1)" in logged_in.get("/tasks/evil").text
    query = logged_in.get("/tasks?q=%3Cscript%3Ealert(1)%3C/script%3E").text
    assert EVIL not in query
    assert EVIL not in logged_in.get("/nowhere/%3Cscript%3Ealert(1)%3C/script%3E").text
    preview = logged_in.get("/actions/revoke?task=%3Cscript%3Ealert(1)%3C%2Fscript%3E").text
    assert EVIL not in preview


def test_escape_sequences_and_passwords_of_others_are_not_shown(client: Client, feed: Feed) -> None:
    feed.task("t1", "a\u202eb\x1b[2J", "FAILURE", exception="E('redis://u:hunter2@h/0')")
    for path in ("/tasks", "/tasks/t1"):
        text = client.get(path).text
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert "hunter2" not in text


# -- the audit log -----------------------------------------------------------------------------


def test_every_change_is_written_down_before_and_after(
    logged_in: Client, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pause(queue: str, **_: object) -> list[dict[str, object]]:
        lines = site.settings.audit.read_text().splitlines()  # type: ignore[union-attr]
        asked.extend(json.loads(line)["stage"] for line in lines)
        return [{"w1@host": {"ok": f"{queue} paused"}}]

    monkeypatch.setattr(site.app.control, "pause", pause)
    answer = logged_in.post("/actions/pause", {"csrf": logged_in.token(), "queue": "mail"})
    assert answer.code == 303
    assert answer.headers["location"] == "/queues"
    assert asked == ["asked"]
    audit = site.settings.audit
    assert audit is not None
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["asked", "done"]
    assert lines[1]["user"] == "admin"
    assert lines[1]["address"] == "127.0.0.1"
    assert lines[1]["target"] == {"queue": "mail"}
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    assert "1 node did so" in logged_in.get("/queues").text
    assert "1 node did so" not in logged_in.get("/queues").text  # told once
    assert "mail" in logged_in.get("/audit").text


def test_what_can_not_be_written_down_is_not_done(
    make_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(password=PASSWORD, audit=tmp_path / "none" / "audit.jsonl")
    client = Client(make_for(site, starts=False))
    client.log_in(PASSWORD)
    done: list[str] = []
    monkeypatch.setattr(site.app.control, "pause", lambda queue, **_: done.append(queue))
    client.post("/actions/pause", {"csrf": client.token(), "queue": "mail"})
    assert done == []
    assert "nothing was done" in client.get("/queues").text


def test_a_preview_changes_nothing(
    logged_in: Client, site: Site, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed.task("t1", state="STARTED")
    monkeypatch.setattr(site.app.control, "broadcast", lambda *_, **__: pytest.fail("told"))
    text = logged_in.get("/actions/terminate?task=t1").text
    assert "shop.charge" in text
    assert "STARTED" in text
    assert site.audit.latest() == []


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/actions/nothing?task=t1", 404),
        ("/actions/revoke", 400),
        ("/actions/revoke?task=" + "x" * 300, 400),
        ("/actions/pause?queue=" + "x" * 300, 400),
        ("/actions/shutdown?node=", 400),
        ("/actions/retry?task=unknown", 409),
    ],
)
def test_actions_that_make_no_sense_are_refused(logged_in: Client, path: str, code: int) -> None:
    assert logged_in.get(path).code == code
