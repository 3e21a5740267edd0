"""``kakeya top`` on a real terminal (tmux), with a real node: it survives what happens to screen and bus."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len

from tests.dashboard.test_feed import Teller
from tests.fleet_rig import Fleet, kept_fleet
from tests.monitor.tmux_kit import PROMPT, Pane, pane
from wire.events import ModelView
from wire.keys import FleetKey

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

FLAGS = ("--telemetry-interval-s", "1")
HOSTILE = "[b]機械\u202e🚀\x1b[2J\x1b]0;owned\x07\r\n"


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two cache peers, which need no model."""
    home = tmp_path_factory.mktemp("home")
    with kept_fleet(request, home / "no-model", home) as made:
        made.start("cache", cache=FLAGS)
        other = made.add("cache", *FLAGS, name="attic")
        other.launch(made["cache"].address)
        other.wait_ready()
        yield made


@pytest.fixture
def terminal(fleet: Fleet, tmp_path: Path) -> Iterator[Pane]:
    with pane(tmp_path, fleet.home) as made:
        yield made


def fills(screen: str, columns: int, rows: int) -> bool:
    """Whether this is a whole frame of that size: heads over the whole width, the keys in the last row."""
    lines = screen.split("\n")
    return len(lines) == rows and "q quit" in lines[-1] and lines[0].startswith(" kakeya top") and "NODES" in screen


def test_it_shows_the_fleet_and_follows_the_size(fleet: Fleet, terminal: Pane) -> None:
    terminal.run("top")
    screen = terminal.wait(lambda screen: "2 online" in screen and "serving" in screen, "both nodes")
    assert fills(screen, 80, 24)
    for columns, rows in ((200, 50), (60, 12), (132, 30), (80, 24)):
        terminal.resize(columns, rows)
        screen = terminal.wait(lambda screen, size=(columns, rows): fills(screen, *size), f"a frame of {columns}x{rows}")
        assert all(cell_len(line) <= columns for line in screen.split("\n"))
    terminal.resize(40, 8)
    terminal.wait(lambda screen: "it needs 60x12" in screen and "it is 40x8" in screen, "that this is too small")
    terminal.resize(80, 24)
    terminal.wait(lambda screen: fills(screen, 80, 24), "the frame again")
    terminal.press("q")
    terminal.wait_for(PROMPT.strip())


def test_a_node_cannot_break_the_screen(fleet: Fleet, terminal: Pane) -> None:
    key = FleetKey.load(fleet.psk_file)
    model = ModelView(model_id="[b]" + "機🚀" * 40)
    teller = Teller("teller", key=key, state="機" * 60, models=(model,))

    def shows_its_lines(screen: str) -> bool:
        teller.say(HOSTILE)  # again and again: what nobody has subscribed to yet is lost
        return "[b]機械?🚀?[2J" in screen and fills(screen, 80, 24)

    try:
        terminal.run("top", "--bus", str(teller.address), "--topic", "node", "--topic", "log")
        screen = terminal.wait(shows_its_lines, "its lines, in a whole frame")
        row = next(line for line in screen.split("\n") if "teller" in line)
        # The columns to the right of the name stand where their heads are, on the terminal's own count of cells.
        head = next(line for line in screen.split("\n") if "NODES" in line)
        assert cell_len(row[: row.index("30%")]) + len("30%") <= cell_len(head[: head.index("OF")])
        assert "owned" not in terminal.state("pane_title")
        terminal.press("q")
        terminal.wait_for(PROMPT.strip())
    finally:
        teller.close()


def test_the_keys_do_what_the_help_says(fleet: Fleet, terminal: Pane) -> None:
    terminal.run("top")
    terminal.wait_for("2 online")
    terminal.press("?")
    terminal.wait_for("part of a name, or a pattern")
    terminal.press("Escape")
    terminal.wait_for(">NODES")
    terminal.press("Tab")
    terminal.wait_for(">JOBS")
    terminal.press("Left")
    terminal.wait_for(">NODES")
    terminal.press("Enter")
    terminal.wait(lambda screen: "JOBS 0" not in screen and ">NODES" in screen, "one panel alone")
    terminal.press("Enter")
    terminal.press("f")
    terminal.type("cach")
    terminal.wait_for("filter by node: cach_")
    terminal.press("Enter")
    terminal.wait(lambda screen: "filter cach" in screen and "attic" not in screen, "the filter")
    terminal.press("Escape")
    terminal.wait_for("attic")
    terminal.press("p")
    terminal.wait_for("PAUSED")
    terminal.press("p")
    terminal.wait(lambda screen: "PAUSED" not in screen, "that it goes on")
    terminal.press("q")
    terminal.wait_for(PROMPT.strip())


def test_the_bus_is_lost_and_returns(fleet: Fleet, terminal: Pane) -> None:
    terminal.run("top")
    terminal.wait_for("2 online")
    for node in fleet.nodes.values():
        node.kill()
    terminal.wait_for("BUS SILENT for")
    # On other ports than before: what the nodes leave under the home tells them.
    for node in fleet.nodes.values():
        node.forget_address()
    fleet["cache"].launch()
    screen = terminal.wait(lambda screen: "BUS IS BACK after" in screen, "the return of the bus")
    assert "SILENT" not in screen
    fleet["cache"].wait_ready()
    fleet.heal()
    terminal.wait(lambda screen: "2 online" in screen and "stale" not in screen, "both nodes again")
    terminal.press("q")
    terminal.wait_for(PROMPT.strip())


@pytest.mark.parametrize("way", ["C-c", "C-z", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_the_terminal_is_afterwards_as_it_was(fleet: Fleet, terminal: Pane, way: str) -> None:
    terminal.type("stty -g; echo before\n")
    before = [line for line in terminal.wait(lambda screen: "\nbefore\n" in screen, "the echo").split("\n") if line]
    settings = next(line for line in before if line.count(":") > 10)
    terminal.run("top")
    terminal.wait_for("2 online")
    assert (terminal.state("alternate_on"), terminal.state("cursor_flag")) == ("1", "0")
    if way == "SIGTERM":
        (process,) = psutil.Process(int(terminal.state("pane_pid"))).children()
        process.terminate()
    else:
        terminal.press(way)
    terminal.wait(lambda screen: screen.rstrip().endswith(PROMPT.strip()), "the prompt")
    assert (terminal.state("alternate_on"), terminal.state("cursor_flag"), terminal.state("wrap_flag")) == ("0", "1", "1")
    terminal.type("stty -g; echo after\n")
    after = terminal.wait(lambda screen: "\nafter\n" in screen, "that what is typed is seen and run")
    assert after.split("\n").count(settings) == 2
    assert "before" in after, "what stood there before is back"
    if way == "C-z":
        terminal.type("fg\n")
        terminal.wait(lambda screen: "2 online" in screen, "the screen after fg")
        assert terminal.state("alternate_on") == "1"
        terminal.press("q")
        terminal.wait(lambda screen: screen.rstrip().endswith(PROMPT.strip()), "the prompt")


def test_without_keys_it_runs_until_it_is_interrupted(fleet: Fleet, terminal: Pane) -> None:
    terminal.type("true\n")
    terminal.run("top", before="</dev/null")
    terminal.wait(lambda screen: "2 online" in screen and "Ctrl-C ends" in screen, "the screen")
    terminal.press("q")
    terminal.press("C-c")
    terminal.wait(lambda screen: screen.rstrip().endswith(PROMPT.strip()), "the prompt")
    assert terminal.state("alternate_on") == "0"


def test_an_ascii_terminal_without_colours_gets_neither(fleet: Fleet, terminal: Pane) -> None:
    terminal.run("top", before="NO_COLOR=1 LC_ALL=C")
    screen = terminal.wait_for("2 online")
    assert screen.isascii()
    assert not re.search(r"\x1b\[[0-9;]*[34][0-8]", terminal.colours()), "a colour, other than the terminal's own"
    terminal.press("q")
    terminal.wait_for(PROMPT.strip())


@pytest.mark.slow
def test_a_dumb_terminal_gets_frames_as_lines(fleet: Fleet, terminal: Pane) -> None:
    terminal.run("top", "--refresh-s", "0.2", "--topic", "node", before="TERM=dumb")
    terminal.wait(lambda screen: screen.count("NODES") > 1 and "2 online" in screen, "frames one below the other")
    assert terminal.state("alternate_on") == "0"
    terminal.press("C-c")
    terminal.wait(lambda screen: screen.rstrip().endswith(PROMPT.strip()), "the prompt")
