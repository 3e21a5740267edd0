"""``kakeya top``: the fleet in a terminal, live; one frame of it; or its events as lines of JSON.

Composition only: the key, the feed, and one of the three outputs. The process holds the telemetry-read key, never the PSK.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dashboard.monitor.controls import Controls, PanelName
from wire.errors import ConfigError, FailureCode, RequestFailed

if TYPE_CHECKING:
    from dashboard.feed import BusFeed
    from dashboard.hub import LiveFleet
    from dashboard.monitor.screen import Camera
    from dashboard.monitor.text import Glyphs
    from wire.keys import TelemetryKey

PANELS_OF: Final = {
    "node": PanelName.NODES,
    "job": PanelName.JOBS,
    "request": PanelName.REQUESTS,
    "transfer": PanelName.TRANSFERS,
    "security": PanelName.SECURITY,
    "eviction": PanelName.LOG,
    "log": PanelName.LOG,
}
"""Where the events of a topic are shown."""
WAIT_SECONDS: Final = 5.0
SETTLED_SECONDS: Final = 0.7
"""With --once: the fleet is known when for so long no node was added and none is missing."""
PLAIN_REFRESH_SECONDS: Final = 5.0
JSON_STEP_SECONDS: Final = 0.5
PLAIN_SIZE: Final = (100, 40)
"""Columns and rows of a frame where nothing tells them."""
SIDES: Final = (1, 1000)


def add_top_command(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Add ``top``; ``add(name, description, examples)`` makes a subcommand's parser."""
    top = add(
        "top",
        "Watch the fleet in the terminal: nodes, prefill jobs, requests, transfers, refusals.",
        "examples:\n  kakeya top                                 the nodes of this machine, and all they know of\n"
        "  kakeya top --bus 192.168.1.20:54100        a fleet elsewhere, with ~/.kakeya/telemetry.key of it\n"
        "  kakeya top --node 'worker-*' --topic job   the jobs of some nodes\n"
        "  kakeya top --once                          one frame, as lines\n"
        "  kakeya top --json --topic request          events, one JSON object a line\n\n"
        "press ? there for the keys\n",
    )
    bus_help = "bus of a node of the fleet; repeatable (default: those of the nodes on this machine); one leads to all"
    top.add_argument("--bus", action="append", default=[], metavar="HOST:PORT", help=bus_help)
    key_help = "the telemetry-read key, mode 0600 (default: ~/.kakeya/telemetry.key, made from fleet.psk where that is)"
    top.add_argument("--telemetry-key-file", default="", metavar="FILE", help=key_help)
    node_help = "only nodes whose name holds this, or fits it when it has * or ?; repeatable"
    top.add_argument("--node", action="append", default=[], metavar="NAME", help=node_help)
    topic_help = "only this kind of event; repeatable"
    top.add_argument("--topic", action="append", default=[], choices=tuple(PANELS_OF), help=topic_help)
    top.add_argument("--once", action="store_true", help="print one frame as soon as the fleet is known, and leave")
    top.add_argument("--json", action="store_true", help="print events instead of frames, one JSON object a line")
    wait_help = f"with --once: how long to wait for the fleet at most (default {WAIT_SECONDS:g})"
    top.add_argument("--wait-s", type=float, default=WAIT_SECONDS, metavar="SECONDS", help=wait_help)
    refresh_help = "time between frames (default 0.5; 5 where the output is no terminal)"
    top.add_argument("--refresh-s", type=float, default=None, metavar="SECONDS", help=refresh_help)
    top.add_argument("--size", default="", metavar="COLUMNSxROWS", help="size of printed frames (default: the terminal's)")
    top.add_argument("--ascii", action="store_true", help="draw with ASCII only (default: where the locale has no more)")
    top.set_defaults(run=run_top)


def run_top(parsed: argparse.Namespace) -> int:
    """Show what was asked for; returns 0.

    Raises:
        ConfigError: an option cannot be used.
        SecretFileError: there is no telemetry key that can be used.
        RequestFailed: with --once, no bus answered in time.
    """
    for name, value in (("--wait-s", parsed.wait_s), ("--refresh-s", parsed.refresh_s)):
        if value is not None and not (math.isfinite(value) and 0.05 <= value <= 3600):
            raise ConfigError(f"{name} is a number of seconds from 0.05 to 3600")
    size = _given_size(parsed.size)
    if parsed.json:
        _run_json(parsed)
        return 0
    from dashboard.hub import LiveFleet
    from dashboard.monitor.screen import Camera
    from dashboard.monitor.terminal import glyphs_of, is_full_screen
    from dashboard.monitor.text import ASCII

    glyphs = ASCII if parsed.ascii else glyphs_of(os.environ, sys.stdout.encoding or "")
    fleet = LiveFleet()
    with _feeding(fleet, parsed) as feed:
        camera = Camera(fleet, feed.figures)
        if parsed.once:
            _wait_for_fleet(fleet, parsed.wait_s, lambda: None)
            _print(camera, _controls(parsed), size, glyphs)
        elif size is None and is_full_screen(os.environ):
            _run_screen(camera, fleet, parsed, glyphs)
        else:
            while True:
                _print(camera, _controls(parsed), size, glyphs)
                print(flush=True)
                time.sleep(parsed.refresh_s or PLAIN_REFRESH_SECONDS)
    return 0


def _run_screen(camera: Camera, fleet: LiveFleet, parsed: argparse.Namespace, glyphs: Glyphs) -> None:
    from dashboard.monitor.screen import REFRESH_S, Screen
    from dashboard.monitor.terminal import full_screen

    logging.basicConfig(handlers=[logging.NullHandler()], force=True)  # a line in the middle of the screen helps nobody
    with full_screen() as terminal:
        Screen(camera, terminal, glyphs, fleet.clock, refresh_s=parsed.refresh_s or REFRESH_S).run(_controls(parsed))


def _run_json(parsed: argparse.Namespace) -> None:
    from dashboard.monitor.event_lines import TOPICS, EventLines, TappedFleet

    fleet = TappedFleet()

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    with _feeding(fleet, parsed) as feed:
        lines = EventLines(
            fleet,
            write,
            shows=_controls(parsed).shows,
            topics=frozenset(TOPICS[name] for name in parsed.topic),
            lost=lambda: _lost(feed),
        )
        if parsed.once:
            _wait_for_fleet(fleet, parsed.wait_s, lambda: lines.step(0.0))
            lines.step(0.0)
        while not parsed.once:
            lines.step(JSON_STEP_SECONDS)


def _lost(feed: BusFeed) -> int:
    figures = feed.figures()
    return figures.get("missed", 0) + figures.get("dropped", 0)


def _controls(parsed: argparse.Namespace) -> Controls:
    wanted = {PANELS_OF[name] for name in parsed.topic} or set(PanelName)
    panels = tuple(name for name in PanelName if name in wanted)
    return Controls(panels=panels, focus=panels[0], nodes=tuple(parsed.node))


def _print(camera: Camera, controls: Controls, size: tuple[int, int] | None, glyphs: Glyphs) -> None:
    from dashboard.monitor.screen import print_frame

    columns, rows = shutil.get_terminal_size(PLAIN_SIZE)
    # One row less than the terminal has, so that the first one stays in sight above the prompt.
    print_frame(camera.take(), controls, size or (columns, rows - 1), glyphs)


def _given_size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text)
    sides = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(SIDES[0] <= side <= SIDES[1] for side in sides):
        raise ConfigError(f"--size is COLUMNSxROWS, for example 200x50, each at most {SIDES[1]}")
    return sides


# --- the feed ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _feeding(fleet: LiveFleet, parsed: argparse.Namespace) -> Iterator[BusFeed]:
    """The fleet fed from its buses while the block lasts."""
    from dashboard.discovery import local_buses
    from dashboard.feed import BusFeed
    from dashboard.speakers import speakers_of
    from kakeya_zmq.config import kakeya_home
    from kakeya_zmq.io.addresses import parse_address
    from kakeya_zmq.io.descriptors import raise_descriptor_limit
    from kakeya_zmq.user_paths import user_path

    home = kakeya_home()
    addresses = [parse_address(text) for text in parsed.bus]
    named = parsed.telemetry_key_file or os.environ.get("KAKEYA_TELEMETRY_KEY_FILE", "")
    named_file = user_path(named, "--telemetry-key-file") if named else None
    key = _telemetry_key(named_file, home)
    raise_descriptor_limit()
    # Who names a bus may mean another fleet than the one on this machine.
    speakers = speakers_of(home, key, named_file)
    discover = tuple if addresses else lambda: local_buses(home)
    feed = BusFeed(fleet, key, addresses=addresses, discover=discover, speakers=speakers)
    try:
        feed.start()
        yield feed
    finally:
        feed.close()


def _telemetry_key(named: Path | None, home: Path) -> TelemetryKey:
    """The key of the file that was named, which is only read; else the home's, made from the PSK where that is.

    Raises:
        SecretFileError: there is none that can be used.
    """
    from wire.keys import TelemetryKey

    if named is not None:
        return TelemetryKey.load(named)
    from daemons.dashboard_command import TELEMETRY_KEY_FILE, load_telemetry_key
    from kakeya_zmq.user_paths import user_path

    psk = os.environ.get("KAKEYA_FLEET_PSK_FILE", "")
    psk_file = user_path(psk, "KAKEYA_FLEET_PSK_FILE") if psk else home / "fleet.psk"
    return load_telemetry_key(home / TELEMETRY_KEY_FILE, psk_file)


def _wait_for_fleet(fleet: LiveFleet, timeout_s: float, each_time: Callable[[], None]) -> None:
    """Wait until every node that is known of is heard and told its state, or until the time is over.

    Raises:
        RequestFailed: nothing was heard at all.
    """
    end = fleet.clock() + timeout_s
    seen = 0
    known: tuple[int, int] = (0, 0)
    since = fleet.clock()
    while (now := fleet.clock()) < end:
        each_time()
        heard, missing = fleet.read(lambda view, at: (view.nodes(at), len(view.unheard())))
        complete = bool(heard) and not missing and all(node.snapshot is not None for node in heard)
        if (len(heard), missing) != known:
            known, since = (len(heard), missing), now
        if complete and now - since >= SETTLED_SECONDS:
            return
        seen = fleet.wait(seen, min(0.1, end - now))
    if not known[0]:
        remedy = "start a fleet with `kakeya up`, name a bus with --bus, or check the telemetry key"
        raise RequestFailed(FailureCode.UNAVAILABLE, "no telemetry bus was heard", remedy=remedy)
