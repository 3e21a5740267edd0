"""Models that cannot be loaded, and texts that cannot be turned into tokens: found without computing with the weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from daemons.doctor.model import judge_folder
from kakeya_zmq.model.folder_probe import weights_fault
from tests.deploy.doctor_rig import Doctor
from tests.fleet_rig import PROJECT
from tests.tiny_models import KINDS, build

TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


@pytest.fixture
def folder(doctor: Doctor, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model, configured for every role that has one."""
    copy = doctor.home / "model"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    monkeypatch.setenv("KAKEYA_MODEL", str(copy))
    return copy


def _edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _faults(doctor: Doctor) -> list[tuple[str, str]]:
    found = doctor.findings(quick=False)
    assert all(row["remedy"] for row in found if row["subject"] == "model")
    return [(row["level"], row["text"]) for row in found if row["subject"] == "model"]


def test_a_model_in_order(doctor: Doctor, folder: Path) -> None:
    assert not _faults(doctor)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "foo"}, "Model type foo not supported"),
        ({"num_hidden_layers": 6}, "Missing"),
        ({"num_hidden_layers": 2}, "not in model: model.layers.2."),
        ({"hidden_size": 32}, "Expected shape"),
        ({"model_file": "evil.py"}, "evil.py"),
    ],
)
def test_a_model_that_mlx_cannot_load(doctor: Doctor, folder: Path, changes: dict[str, Any], words: str) -> None:
    """Two roles have it, and it is one fault."""
    _edit(folder, **changes)
    ((level, text),) = _faults(doctor)
    assert level == "problem"
    assert text.startswith(f"{folder}: mlx-lm cannot load it: ")
    assert words in text
    assert not doctor.about("model"), "a quick look loads nothing"


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "1.0"', b"\xff"])
def test_a_tokenizer_that_is_broken(doctor: Doctor, folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    told = f"no text can be turned into tokens: {folder / 'tokenizer.json'} is not a tokenizer"
    assert _faults(doctor) == [("problem", told)]


def test_a_tokenizer_that_is_missing(doctor: Doctor, folder: Path) -> None:
    """Whoever sends token ids needs none."""
    (folder / "tokenizer.json").unlink()
    assert _faults(doctor) == [("warning", f"no text can be turned into tokens: {folder} has no tokenizer.json")]


def test_a_folder_without_a_model_is_one_fault_of_two_roles(doctor: Doctor, folder: Path) -> None:
    (folder / "config.json").unlink()
    assert _faults(doctor) == [("problem", f"no config.json in {folder}")]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_is_said_about_a_model_that_can_be_loaded(kind: str, tmp_path: Path) -> None:
    """Of every kind of cache: parameters that nobody computes have names and shapes like those that were saved."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    built = build(kind)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(built.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(_config_of(built)))
    assert weights_fault(tmp_path) is None


def _config_of(model: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(model.args).items() if value is not None}


COMPUTES = """
import sys, threading
import mlx.core as mx
import mlx_lm.utils
from kakeya_zmq.model import folder_probe

def load_model(folder, lazy):
    weights = mx.ones((folder_probe.MEMORY_MAX_BYTES // 4 + 1024,))
    mx.eval(weights)
    threading.Event().wait(60)
    raise ValueError("never told")

mlx_lm.utils.load_model = load_model
folder_probe._tell("weights", folder_probe.weights_fault(folder_probe.Path("/nowhere")))
sys.exit(3)
"""


def test_a_kind_that_computes_while_it_is_loaded_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPUTES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd=PROJECT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_is_no_verdict_says_nothing(tmp_path: Path) -> None:
    assert not list(judge_folder(tmp_path, None)), "it took too long"
    for output in ("", "a library's remark\n", '{"part": "weights"}\n'):
        assert not list(judge_folder(tmp_path, subprocess.CompletedProcess([], 1, output, "Traceback")))
