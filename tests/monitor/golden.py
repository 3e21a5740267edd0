"""The golden frames: ``python -m tests.monitor.golden`` writes them anew; look at what changed before you keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dashboard.monitor.controls import Controls, PanelName
from dashboard.monitor.frame import Frame, render
from dashboard.monitor.picture import Picture
from dashboard.monitor.text import ASCII, UNICODE, Glyphs
from tests.monitor.fixtures_picture import busy_picture, silent_picture, waiting_picture

DEFAULTS = Controls()
FOLDER = Path(__file__).with_name("golden")


@dataclass(frozen=True, slots=True)
class Scene:
    picture: Callable[[], Picture]
    columns: int
    rows: int
    controls: Controls = DEFAULTS
    glyphs: Glyphs = UNICODE

    def draw(self) -> Frame:
        return render(self.picture(), self.controls, self.columns, self.rows, self.glyphs)


SCENES = {
    "busy-80x24": Scene(busy_picture, 80, 24),
    "busy-200x50": Scene(busy_picture, 200, 50),
    "ascii-80x24": Scene(busy_picture, 80, 24, glyphs=ASCII),
    "silent-80x24": Scene(silent_picture, 80, 24),
    "waiting-80x24": Scene(waiting_picture, 80, 24),
    "zoomed-120x30": Scene(busy_picture, 120, 30, Controls(focus=PanelName.REQUESTS, zoomed=True)),
    "help-80x24": Scene(busy_picture, 80, 24, Controls(helping=True)),
    "small-40x10": Scene(busy_picture, 40, 10),
}


def as_text(frame: Frame) -> str:
    """The frame without colours; what is drawn inverted has a ``!`` at its left, since that matters without colours."""
    lines = [f"{'!' if 'reverse' in str(line.style) else ' '}|{line.plain}|" for line in frame.lines]
    return "\n".join(lines) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, scene in SCENES.items():
        (FOLDER / f"{name}.txt").write_text(as_text(scene.draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
