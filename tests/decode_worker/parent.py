"""A parent for tests that kill it: starts a toy child, tells its process id on standard output, and does as it is told.

Usage: ``python -m tests.decode_worker.parent idle|hang|load``
"""

from __future__ import annotations

import sys
import threading

import msgspec
import numpy as np

from kakeya_zmq.decode_worker.engine import DecodeWorkerEngine
from kakeya_zmq.engine import OpenSession, Prefill
from tests.decode_worker.kit import run, toy_settings
from tests.decode_worker.toy_engine import HANG


def main() -> None:
    what = sys.argv[1]
    settings = toy_settings(settings=msgspec.msgpack.encode({"silent": True} if what == "load" else {}))
    engine: list[DecodeWorkerEngine] = []

    def tell(name: str) -> None:
        # In a load: the child has said something, so it runs. In a hang: the request that it never answers is on its way.
        wanted = {"load": "received Told", "hang": "sent Start"}.get(what, "")
        if name == wanted and (what == "load" or asked.is_set()):
            print(engine[0].figures().pid, flush=True)

    asked = threading.Event()
    engine.append(DecodeWorkerEngine(settings, boundary=tell))
    engine[0].start()
    run(engine[0], [OpenSession("s"), Prefill("s", np.arange(9, dtype=np.int32))])
    if what == "idle":
        print(engine[0].figures().pid, flush=True)
        threading.Event().wait()
    asked.set()
    run(engine[0], [Prefill("s", np.array([HANG], dtype=np.int32))])


if __name__ == "__main__":
    main()
