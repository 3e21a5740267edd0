"""The live monitor: pictures of the fleet become frames on the terminal, keys become controls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from dashboard.fleet_view import BusState, FleetView
from dashboard.hub import LiveFleet
from dashboard.monitor.controls import Controls, press
from dashboard.monitor.frame import Frame, render
from dashboard.monitor.keys import KeyDecoder
from dashboard.monitor.picture import BusWatch, Picture, take
from dashboard.monitor.terminal import Painter, Terminal
from dashboard.monitor.text import Glyphs

REFRESH_S: Final = 0.5
NO_BUS: Final = "no bus is known: start a fleet with `kakeya up`, or name one with --bus"
NOT_LET_IN: Final = "a bus refused this key: is telemetry.key that of this fleet?"


class Camera:
    """Takes pictures of a fleet that is being fed.

    Args:
        figures: counters of the feed (:meth:`dashboard.feed.BusFeed.figures`).
    """

    def __init__(self, fleet: LiveFleet, figures: Callable[[], Mapping[str, int]]) -> None:
        self._fleet = fleet
        self._figures = figures
        self._watch = BusWatch()

    def take(self) -> Picture:
        figures = self._figures()
        lost = figures.get("missed", 0) + figures.get("dropped", 0)

        def picture(view: FleetView, now: float) -> Picture:
            state = view.bus_state(now)
            hint = _hint(figures) if state is BusState.WAITING else ""
            return take(view, now, self._watch.observe(state, view.last_message_at, now, hint), lost)

        return self._fleet.read(picture)


def _hint(figures: Mapping[str, int]) -> str:
    if figures.get("handshakes_rejected", 0) or figures.get("unauthentic", 0):
        return NOT_LET_IN
    addresses = figures.get("addresses", 0)
    return f"waiting for {addresses} {'bus' if addresses == 1 else 'buses'} to answer" if addresses else NO_BUS


class Screen:
    """Shows the fleet until somebody quits.

    Args:
        refresh_s: seconds between frames; keys and a changed size are answered at once.
    """

    def __init__(
        self, camera: Camera, terminal: Terminal, glyphs: Glyphs, clock: Callable[[], float], *, refresh_s: float = REFRESH_S
    ) -> None:
        self._camera = camera
        self._terminal = terminal
        self._glyphs = glyphs
        self._clock = clock
        self._refresh_s = refresh_s
        self._decoder = KeyDecoder()

    def run(self, controls: Controls) -> None:
        """Until the key for it, or until the terminal is gone."""
        controls = replace(controls, has_keys=self._terminal.has_keys)
        picture = self._camera.take()
        due = self._clock() + self._refresh_s
        while not controls.quitting:
            if self._clock() >= due:
                due = self._clock() + self._refresh_s
                picture = picture if controls.paused else self._camera.take()
            frame = self._show(picture, controls)
            typed = self._terminal.wait(min(due, self._decoder.deadline() or due) - self._clock())
            if typed is None:
                return
            self._terminal.obey()
            for key in self._decoder.feed(typed, self._clock()):
                if key == "redraw":
                    self._terminal.forget()
                controls = press(controls, key, frame.extents)

    def _show(self, picture: Picture, controls: Controls) -> Frame:
        size = self._terminal.size()
        frame = render(picture, controls, *size, self._glyphs)
        self._terminal.paint(frame.lines, size)
        return frame


def print_frame(picture: Picture, controls: Controls, size: tuple[int, int], glyphs: Glyphs) -> None:
    """One frame as lines on standard output, with the colours a terminal there has; empty rows at its end are left out."""
    frame = render(picture, controls, size[0], size[1] + 1, glyphs)
    lines = list(frame.lines[:-1])  # without the line about keys
    while lines and not lines[-1].plain.strip():
        lines.pop()
    drawn = Painter(colour=sys.stdout.isatty()).draw(lines)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in drawn))
    sys.stdout.flush()
