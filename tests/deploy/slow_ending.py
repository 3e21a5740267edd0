"""``python -m tests.deploy.slow_ending cache …``: a cache peer that says when it begins to end, and then never gets done."""

from __future__ import annotations

import sys
import threading

from daemons.cache import Cache
from daemons.command import main

ENDING = "ending"


def _end(self: Cache, reason: str) -> None:
    print(ENDING, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    Cache.end = _end  # type: ignore[method-assign]
    sys.exit(main())
