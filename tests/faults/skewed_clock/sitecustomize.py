"""Python imports this at start when its folder is in PYTHONPATH: the wall clock of the process is wrong by so many seconds.

Only ``time.time`` and ``time.time_ns``: the monotonic clock of a machine is right even when nobody has set its wall clock.
"""

import os
import time

_shift_s = int(os.environ.get("TEST_CLOCK_SHIFT_S", "0"))
_time, _time_ns = time.time, time.time_ns


def _shifted() -> float:
    return _time() + _shift_s


def _shifted_ns() -> int:
    return _time_ns() + _shift_s * 1_000_000_000


time.time = _shifted
time.time_ns = _shifted_ns
