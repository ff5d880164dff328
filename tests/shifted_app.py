"""The probe application on a host whose wall clock is off by `SHIFT_S` seconds.

Only this process sees it: nothing else than the functions of `time` is changed, before anything
asks them. Its own monotonic time is right, as it would be on such a host.
"""

from __future__ import annotations

import os
import time

_SHIFT_S = float(os.environ["SHIFT_S"])
_time, _time_ns = time.time, time.time_ns


def _shifted() -> float:
    return _time() + _SHIFT_S


def _shifted_ns() -> int:
    return _time_ns() + int(_SHIFT_S * 1e9)


time.time, time.time_ns = _shifted, _shifted_ns

from tests.probe_app import app  # noqa: E402

__all__ = ["app"]
