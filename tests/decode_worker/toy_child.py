"""A child process around :class:`tests.decode_worker.toy_engine.ToyEngine`; its settings say how it should behave.

``{"refuse": text}``: says that the model cannot be loaded. ``{"silent": true}``: never gets ready, with
``{"silent_if": path}`` when there is such a file. ``{"weights": path}``:
the file's length is part of the model's facts. Otherwise it serves.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import msgspec

from kakeya_zmq.decode_worker.channel import ChannelClosed
from kakeya_zmq.decode_worker.serve import connect, end_with_parent, receive_settings, refuse, serve, tell
from tests.decode_worker.toy_engine import FACTS, ToyEngine
from wire.errors import ModelError


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    channel = connect(parser.parse_args().channel)
    first = receive_settings(channel)
    settings = msgspec.msgpack.decode(first.settings) or {}
    tell(channel, "loading")
    if "refuse" in settings:
        refuse(channel, ModelError(settings["refuse"], remedy="another folder"))
        return
    if settings.get("silent") or ("silent_if" in settings and Path(settings["silent_if"]).exists()):
        threading.Event().wait()
    facts = FACTS
    if "weights" in settings:
        facts = replace(FACTS, weight_bytes=Path(settings["weights"]).stat().st_size)
    serve(channel, ToyEngine(facts), 123.0 if first.measure else 0.0)


if __name__ == "__main__":
    with contextlib.suppress(ChannelClosed):
        main()
