"""The decode worker's process (docs/decode-worker.md): started by a primary, lives no longer than it.

    python -m daemons.decode_child --channel DESCRIPTOR

The descriptor is an inherited socket, over which the settings come first. Signals that stop a daemon are ignored here: they
often reach the whole process group, and the primary still needs its model while it drains.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import msgspec

from daemons.engine_loading import load_model
from daemons.run import leave
from kakeya_zmq.calibration import measure_prefill
from kakeya_zmq.config import Settings
from kakeya_zmq.decode_worker.channel import Channel, ChannelClosed
from kakeya_zmq.decode_worker.serve import connect, end_with_parent, receive_settings, refuse, serve, tell
from kakeya_zmq.io.memory import tune_heap


class ChildSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the primary hands over; ``assertions`` as parsed, ``folder`` of the model."""

    settings: Settings
    folder: str
    assertions: dict[str, str | int]


def child_settings(settings: Settings, folder: Path, assertions: dict[str, str | int]) -> bytes:
    """For :class:`kakeya_zmq.decode_worker.engine.WorkerSettings`."""
    return msgspec.msgpack.encode(ChildSettings(settings, str(folder), assertions))


def main() -> int:
    """Load the model and serve the parent until it is gone. Returns the exit code: 0 unless there was a bug."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    parser = argparse.ArgumentParser(prog="daemons.decode_child", allow_abbrev=False)
    parser.add_argument("--channel", type=int, required=True, metavar="DESCRIPTOR")
    channel = connect(parser.parse_args().channel)
    try:
        return _run(channel)
    except ChannelClosed:
        return 0


def _run(channel: Channel) -> int:
    first = receive_settings(channel)
    given = msgspec.msgpack.decode(first.settings, type=ChildSettings)
    # What goes wrong here and is not the model's fault ends the process: the parent sees that, and has a log.
    tune_heap()
    try:
        engine = load_model(given.settings, Path(given.folder), given.assertions, tell=lambda text: tell(channel, text))
    except Exception as error:  # whatever a model library raises: the parent must learn it
        refuse(channel, error)
        return 0
    rate = measure_prefill(engine) if first.measure else 0.0
    if rate:
        tell(channel, f"prefill on this machine: {rate:.0f} tokens/s")
    serve(channel, engine, rate)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception as error:
        # Its name only: values in a traceback may be parts of prompts.
        sys.stderr.write(f"decode worker: {type(error).__name__}\n")
        code = 1
    leave(code)
