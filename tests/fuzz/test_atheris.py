"""Coverage-guided fuzzing of every reader, over a million executions altogether (docs/security.md has the figures)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet_rig import clean_environment
from tests.fuzz.targets import targets

PROJECT = Path(__file__).resolve().parents[2]
NAMES = sorted(targets())
SLOW = {"configuration", "known nodes"}
"""Each execution goes through a file."""
RUNS = 40_000
RUNS_SLOW = 8_000


def runs_of(name: str) -> int:
    return RUNS_SLOW if name in SLOW else RUNS


def test_a_million_executions_are_planned() -> None:
    assert sum(map(runs_of, NAMES)) >= 1_000_000


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_reader(name: str, tmp_path: Path) -> None:
    runs = runs_of(name)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.harness", name, str(runs), f"-artifact_prefix={tmp_path}/", "-seed=1"],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env=clean_environment(),
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    executed = re.search(r"executions (\d+)", ended.stdout)
    assert executed is not None
    assert int(executed[1]) >= runs
