"""Every page, clicked through in a real browser against a live cluster."""

from __future__ import annotations

import json
import re
import time
import urllib.request
import uuid
from typing import Any

import pytest

from tests.browser.conftest import SHOTS, TASKS, Cluster
from tests.servers import wait_until

pytestmark = pytest.mark.timeout(180)


def shot(page: Any, name: str) -> None:
    """Kept for people to look at."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(SHOTS / f"{name}.png"))


def asked(cluster: Cluster, path: str) -> Any:
    with urllib.request.urlopen(f"{cluster.url}/api/v1{path}", timeout=20) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def busy(cluster: Cluster) -> Cluster:
    """Some thousand tasks, with failures, retries and families."""
    app = cluster.app
    charge, resize, order = (app.tasks[n] for n in ("shop.charge", "img.resize", "shop.order"))
    app.send_many(
        [order.s(number) for number in range(40)]
        + [resize.s(f"{number}.png", number % 4 == 0) for number in range(60)]
        + [charge.s(number) for number in range(TASKS)]
    )
    wait_until(
        lambda: asked(cluster, "/tasks?q=state:done&rows=1")["count"] >= TASKS + 40 * 5 + 60,
        120,
        "all tasks to end",
    )
    return cluster


def test_the_cluster_page_shows_every_node_and_stays_live(page: Any, busy: Cluster) -> None:
    page.goto("/")
    for name in ("w1@shop", "w2@shop", "w3@shop"):
        page.locator(f'tr[data-key="{name}"] .state.good').wait_for()
    page.locator('tr[data-key="w1@shop"] .gauge').wait_for()  # it has answered what its pool is
    cell = page.locator('tr[data-key="type shop.nightly"]')
    assert cell.count() == 0
    began = time.monotonic()
    busy.app.tasks["shop.nightly"].delay()
    cell.wait_for(timeout=10_000)
    took_s = time.monotonic() - began
    shot(page, "cluster")
    assert took_s < 2.0, f"a live update took {took_s:.1f} s"


def test_a_task_is_found_by_search_and_opened_by_keyboard(admin: Any, busy: Cluster) -> None:
    page = admin  # others see no traceback
    page.goto("/")
    page.keyboard.press("/")
    page.wait_for_url("**/tasks?focus=1")
    page.fill("#search", "state:failed name:img.*")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"q=state"))
    rows = page.locator("tr[data-key]")
    assert rows.count() == 15
    shot(page, "tasks")
    page.keyboard.press("j")
    page.keyboard.press("j")
    wanted = page.locator("tr.selected").get_attribute("data-key")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/tasks/{wanted}")
    assert page.locator(".trace").inner_text().count("is no picture") >= 1
    assert page.locator("main b").count() == 0  # the <b> of the error is text
    assert page.locator('tr[data-key^="attempt"]').count() == 2
    shot(page, "task-failed")
    page.goto("/tasks?q=name:shop.order")
    page.locator("tr[data-key] a").first.click()
    page.locator(".tree li").nth(4).wait_for()
    shot(page, "task-family")
    page.goto("/tasks?q=colour:red")
    assert "unknown key" in page.locator(".remark.bad").inner_text()


def test_a_task_is_revoked_after_a_confirmation(admin: Any, busy: Cluster) -> None:
    page = admin
    sent = busy.app.tasks["shop.wait"].apply_async((0.1,), countdown=600)
    wait_until(
        lambda: asked(busy, f"/tasks?q=id:{sent.id}%20state:received")["count"], 20, "its receipt"
    )
    page.goto(f"/tasks/{sent.id}")
    page.click("text=Revoke…")
    page.locator("#confirm[open]").wait_for()
    assert sent.id in page.locator("#confirm").inner_text()
    shot(page, "revoke")
    page.click("#confirm a[data-close]")
    assert not page.locator("#confirm[open]").count()
    page.click("text=Revoke…")
    page.click("#confirm button")
    page.locator(".note.good").wait_for()
    assert "3 nodes did so" in page.locator(".note.good").inner_text()
    revoked = busy.app.control.inspect().revoked()
    assert all(sent.id in ids for ids in revoked.values())
    page.goto("/audit")
    assert sent.id in page.locator("main").inner_text()
    lines = (busy.directory / "umbel-audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines][-2:] == ["asked", "done"]


def test_a_task_is_sent_again(admin: Any, busy: Cluster) -> None:
    page = admin
    sent = busy.app.tasks["shop.charge"].delay(424242)
    assert sent.get(timeout=20) == 424242
    wait_until(lambda: asked(busy, f"/tasks?q=id:{sent.id}%20state:done")["count"], 20, "its end")
    page.goto(f"/tasks/{sent.id}")
    page.click("text=Send again…")
    page.click("#confirm button")
    said = page.locator(".note.good").inner_text()
    again = re.search(r"sent again as (\S+)", said)
    assert again is not None
    assert busy.app.AsyncResult(again[1]).get(timeout=20) == 424242


def test_a_queue_is_paused_and_resumed(admin: Any, busy: Cluster) -> None:
    page = admin
    page.goto("/queues")
    row = page.locator('tr[data-key="mail"]')
    row.wait_for()
    row.locator("text=pause…").click()
    page.locator("#confirm[open]").wait_for()
    page.click("#confirm button")
    page.locator('tr[data-key="mail"] .state.again').wait_for()
    sent = busy.app.tasks["shop.charge"].apply_async((1,), queue="mail")
    page.locator('tr[data-key="mail"] td:nth-child(3) b:text-is("1")').wait_for()
    page.locator('tr[data-key="mail"]:has-text("shop.charge")').wait_for()
    shot(page, "queues")
    row.locator("text=resume…").click()
    page.click("#confirm button")
    page.locator('tr[data-key="mail"] .state.good').wait_for()
    assert sent.get(timeout=20) == 1


def test_the_elections_page_shows_a_real_election(page: Any, busy: Cluster) -> None:
    page.goto("/elections")
    id_ = str(uuid.uuid4())
    task = busy.app.tasks["shop.nightly"]
    busy.app.control.election(id_, "task", action=task.s())
    article = page.locator(f'article[data-key="{id_}"].decided')
    article.wait_for()
    assert article.locator("tbody tr").count() == 3
    winner = article.locator("tr.won td:nth-child(2)").inner_text().removeprefix("★ ")
    assert re.fullmatch(r"w[123]@shop", winner)
    page.locator(f'article[data-key="{id_}"] .state:text-is("success")').wait_for()
    shot(page, "elections")
    page.goto("/")
    page.locator(f'tr[data-key="{winner}"] .badge.lead').wait_for()


def test_the_timeline_draws_all_bars_and_pans_smoothly(page: Any, busy: Cluster) -> None:
    page.goto("/timeline")
    canvas = page.locator("#timeline")
    # No functions of the page's own: its policy forbids to make scripts of texts.
    told = lambda name: int(canvas.get_attribute(f"data-{name}") or 0)  # noqa: E731
    wait_until(lambda: told("bars") >= TASKS, 15, "the bars to be known")
    page.click("#fit")
    wait_until(lambda: told("drawn") >= TASKS, 15, "the bars to be drawn")
    shot(page, "timeline")
    page.keyboard.press("-")  # room at both sides: all stay in view while it pans
    panned = page.evaluate(PAN)
    (SHOTS / "timeline.json").write_text(json.dumps(panned))
    page.click("#mode-logical")
    page.click("#fit")
    page.locator('#timeline[data-mode="logical"]').wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 330, box["y"] + 60)
    page.keyboard.down("Control")
    for _ in range(9):
        page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    wait_until(lambda: 0 < told("drawn") < TASKS / 2, 15, "the wheel to zoom")
    for step in range(40):
        page.mouse.move(box["x"] + 300 + step * 20, box["y"] + 40 + (step % 4) * 16)
        if page.locator("#tip").is_visible():
            break
    assert "clock" in page.locator("#tip").inner_text()
    shot(page, "timeline-logical")
    # A family in its own time: the arrows of an order's children, near the end of it all.
    page.click("#mode-wall")
    page.click("#fit")
    wait_until(lambda: told("arrows") >= 40 * 4, 15, "the causes to be known")
    before = told("bars")
    sent = busy.app.tasks["shop.order"].delay(7)
    sent.get(timeout=20)
    family = f"/tasks?q=root:{sent.id}%20state:done"
    wait_until(lambda: asked(busy, family)["count"] == 5, 15, "the family to end")
    wait_until(lambda: told("bars") >= before + 5, 15, "the family to be known")
    page.wait_for_timeout(1_000)  # its ends are drawn with the next update
    page.click("#fit")
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 60)
    page.keyboard.down("Control")
    for _ in range(80):
        page.mouse.wheel(0, -40)
        page.wait_for_timeout(30)
        if told("drawn") <= 5:
            break
    page.mouse.move(box["x"] + box["width"] - 44, box["y"] + 60)
    for _ in range(40):  # as near as all of them can be seen
        page.mouse.wheel(0, -40)
        page.wait_for_timeout(30)
        if told("drawn") < 5:
            page.mouse.wheel(0, 40)
            break
    page.keyboard.up("Control")
    wait_until(lambda: 4 <= told("arrows") <= 5, 15, "the arrows of one family")
    shot(page, "timeline-causes")
    # Of three seconds the best, as a busy machine is not the page's affair.
    assert max(panned["frames_per_s"]) >= 30, panned
    assert panned["bars_min"] >= TASKS


PAN = """async () => {
  const canvas = document.getElementById('timeline'), took = [], rates = [], bars = [];
  const frame = () => new Promise(requestAnimationFrame);
  for (let second = 0; second < 3; second += 1) {
    const began = await frame();
    let frames = 0, now = began;
    while (now - began < 1000) {
      const key = bars.length % 2 ? 'ArrowRight' : 'ArrowLeft';  // to and fro
      const before = canvas.dataset.frames;
      document.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
      do { now = await frame(); } while (canvas.dataset.frames === before);
      took.push(+canvas.dataset.took);
      bars.push(+canvas.dataset.drawn);
      frames += 1;
    }
    rates.push(Math.round(frames * 1000 / (now - began)));
  }
  took.sort((one, other) => one - other);
  const median = took[took.length >> 1];
  return {bars_min: Math.min(...bars), frames_per_s: rates, frame_ms_median: median};
}"""


def test_a_killed_node_is_told_as_lost_and_a_broker_restart_is_survived(
    page: Any, busy: Cluster
) -> None:
    page.goto("/")
    page.locator('tr[data-key="w2@shop"] .state.good').wait_for()
    busy.workers["w2"].kill()
    page.locator('tr[data-key="w2@shop"] .state.bad').wait_for(timeout=20_000)
    busy.redis.restart()
    wait_until(lambda: asked(busy, "/cluster")["condition"] == "", 30, "the broker to be heard")
    began = asked(busy, "/cluster")["totals"]["events"]
    wait_until(lambda: asked(busy, "/cluster")["totals"]["events"] > began, 30, "events again")
    page.locator('tr[data-key="w1@shop"] .state.good').wait_for()
    shot(page, "cluster-lost")


EVERY_PAGE = ("/", "/tasks", "/timeline", "/elections", "/queues", "/history")


@pytest.mark.parametrize(
    ("device", "width", "scheme"),
    [("phone", 390, "dark"), ("phone", 390, "light"), ("desk", 1360, "dark")],
)
def test_pages_are_readable_on_a_phone_and_in_the_dark(
    browser: Any, busy: Cluster, device: str, width: int, scheme: str
) -> None:
    phone = {"device_scale_factor": 2, "is_mobile": True, "has_touch": True}
    context = browser.new_context(
        viewport={"width": width, "height": 844}, base_url=busy.url, color_scheme=scheme,
        **(phone if device == "phone" else {}),
    )  # fmt: skip
    page = context.new_page()
    for path in EVERY_PAGE:
        page.goto(path)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{path} is {wide} pixels wide"
        shot(page, f"{device}-{scheme}{path.rstrip('/').replace('/', '-') or '-cluster'}")
    colours = {"dark": "rgb(19, 21, 25)", "light": "rgb(246, 246, 243)"}
    other = {"dark": "light", "light": "dark"}[scheme]
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) == colours[scheme]
    page.click("#theme")
    assert page.evaluate(colour) == colours[other]
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == other
    context.close()


def test_the_history_and_the_time_machine_are_shown(page: Any, cluster: Cluster) -> None:
    page.goto("/history")
    page.locator("#throughput svg").wait_for()
    assert page.locator("#failures").count() == 1
    shot(page, "history")
    page.click("text=Time machine")
    then = asked(cluster, "/history")
    page.fill("input[name=time]", str((then["first"] + then["last"]) / 2))
    page.click(".machine button")
    page.locator("h2:has-text('Running')").wait_for()
    shot(page, "time-machine")


def test_the_keys_are_listed(page: Any, cluster: Cluster) -> None:
    page.goto("/")
    page.keyboard.press("?")
    page.locator("#help[open]").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("e")
    page.wait_for_url("**/elections")
