"""``kakeya demo --once`` as a newcomer runs it: real processes, the real model, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kakeya_zmq.demo.prepare import prepare_demo_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

KEYS = {
    "ok",
    "tokens_equal",
    "prompt_tokens",
    "cold_ttft_s",
    "worker_ttft_s",
    "remote_hit_ttft_s",
    "hot_ttft_s",
    "remote_hit_bytes",
    "decode_tok_s",
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A Kakeya home of its own; whatever still runs out of it at the end is stopped."""
    yield tmp_path / "home"
    for process in running_out_of(tmp_path / "home"):
        process.kill()
        process.wait(10)


def running_out_of(home: Path) -> list[psutil.Process]:
    """Processes of this user whose Kakeya home is ``home``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KAKEYA_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone while we looked, or not ours to look at
            continue
    return found


def test_the_demonstration_answers_four_ways_and_leaves_nothing_behind(home: Path) -> None:
    prepare_demo_model(on_progress=lambda step, share: None)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAKEYA_")}
    if "KAKEYA_MODEL_CACHE" in os.environ:
        environment["KAKEYA_MODEL_CACHE"] = os.environ["KAKEYA_MODEL_CACHE"]
    finished = subprocess.run(
        [sys.executable, "-m", "daemons", "demo", "--once", "--json", "--ephemeral"],
        env={**environment, "KAKEYA_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result.keys() >= KEYS
    assert result["ok"] is True
    assert result["tokens_equal"] is True
    assert result["prompt_tokens"] >= 2_000
    assert result["remote_hit_bytes"] > 0
    assert all(result[key] > 0 for key in KEYS if key.endswith("_s"))
    assert running_out_of(home) == []
    assert not (home / "run" / "fleet.json").exists()
    assert (home / "fleet.psk").stat().st_mode & 0o777 == 0o600
