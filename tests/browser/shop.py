"""The application that the browser tests look at."""

from __future__ import annotations

import os
import time

from umbel import Umbel

app = Umbel(
    "shop",
    broker=os.environ.get("SHOP_BROKER"),
    backend=os.environ.get("SHOP_BACKEND"),
    task_send_sent_event=True,
    result_extended=True,
    set_as_current=False,
)


@app.task(name="shop.charge")
def charge(order: int) -> int:
    return order


@app.task(name="img.resize", bind=True, max_retries=1, default_retry_delay=0.05)
def resize(self, picture: str, fails: bool = False) -> str:  # type: ignore[no-untyped-def]
    time.sleep(0.02)
    if fails and self.request.retries == 0:
        raise self.retry(exc=OSError("disk busy"))
    if fails:
        raise ValueError(f"<b>{picture}</b> is no picture")
    return picture


@app.task(name="shop.order")
def order(number: int) -> None:
    time.sleep(0.02)
    for part in range(3):
        charge.delay(number * 10 + part)
    resize.delay(f"{number}.png")


@app.task(name="shop.wait")
def wait(seconds: float) -> None:
    time.sleep(seconds)


@app.task(name="shop.nightly")
def nightly() -> str:
    return "done"
