"""Which application is meant when none is named."""

from __future__ import annotations

import pytest

from umbel.app import current
from umbel.app.canvas import signature
from umbel.app.current import current_app
from umbel.app.umbel import Umbel


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start of a process; afterwards it is as it was."""
    monkeypatch.setattr(current, "_current", None)
    monkeypatch.setenv("UMBEL_BROKER_URL", "memory://")


def test_a_plain_application_is_made_when_there_is_none() -> None:
    app = current_app()
    assert app.main == "default"
    assert current_app() is app


def test_the_last_one_made_is_current_unless_it_declines() -> None:
    first = Umbel("first")
    assert current_app() is first
    second = Umbel("second")
    Umbel("third", set_as_current=False)
    assert current_app() is second


def test_an_application_can_be_made_current_again() -> None:
    first = Umbel("first")
    Umbel("second")
    first.set_current()
    assert current_app() is first
    second = Umbel("third", set_as_current=False)
    second.set_default()
    assert current_app() is second


def test_a_signature_without_an_application_means_the_current_one() -> None:
    app = Umbel("first")
    assert signature("some.task", (1,)).app is app
