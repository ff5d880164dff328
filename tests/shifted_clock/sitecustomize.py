"""Shifts the wall clock of an interpreter that has this directory first on its path.

Python imports `sitecustomize` before anything else, so every later `from time import time` gets the
shifted clock, in the children that the process forks too. `datetime.now` is not shifted: it reads
the clock in C.
"""

from __future__ import annotations

import os
import time

_shift_s = float(os.environ["CLOCK_SHIFT_S"])
_time, _time_ns = time.time, time.time_ns

time.time = lambda: _time() + _shift_s
time.time_ns = lambda: _time_ns() + int(_shift_s * 1e9)
