"""What the templates render to: valid property lists and units, without secrets or personal paths."""

from __future__ import annotations

import json
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.render_service import (
    TemplateError,
    command_line,
    quote_unit,
    render,
    render_arguments,
    substitute,
)
from tests.deploy.service_rig import DEPLOY, PROJECT, TEMPLATES, UNITS, make_home

KEYS: dict[str, type | tuple[type, ...]] = {
    "Label": str,
    "ProgramArguments": list,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": (bool, dict),
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "Umask": int,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
"""Keys of launchd.plist(5) that are used, with their types."""
LOGS = {
    "ai.kakeya.zmq-runtime-prefill": "zmq-runtime-prefill.log",
    "ai.kakeya.prefill-network": "prefill-network.log",
    "ai.kakeya.prefill-network-peer": "prefill-cache.log",
    "ai.kakeya.prefill-worker": "prefill-worker.log",
}
DRAIN_SECONDS = 30


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    home = make_home(tmp_path)
    command = str(Path(sys.executable).with_name("kakeya"))
    names = ("KAKEYA_WORKER_COMMAND", "KAKEYA_RUNTIME_COMMAND", "KAKEYA_NETWORK_COMMAND")
    return {**home.environment, **dict.fromkeys(names, command)}


def _rendered(template: Path, environment: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = plistlib.loads(render(template, environment))
    return document


def test_every_agent_of_the_runbook_is_there() -> None:
    assert {template.stem for template in TEMPLATES} == set(LOGS)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_rendered_agent_is_what_launchd_reads(template: Path, environment: dict[str, str]) -> None:
    document = _rendered(template, environment)
    assert set(document) <= set(KEYS)
    for key, value in document.items():
        assert isinstance(value, KEYS[key]), key
    assert document["Label"] == template.stem
    assert all(isinstance(item, str) for item in document["ProgramArguments"])
    assert Path(document["ProgramArguments"][0]).is_absolute()
    assert document["RunAtLoad"] is True
    assert document["KeepAlive"] == {"SuccessfulExit": False}
    assert document["ThrottleInterval"] >= 10
    assert document["ExitTimeOut"] > DRAIN_SECONDS
    log = f"{environment['HOME']}/.kakeya/{LOGS[template.stem]}"
    assert (document["StandardOutPath"], document["StandardErrorPath"]) == (log, log)
    assert document["ProcessType"] in {"Background", "Standard", "Adaptive", "Interactive"}
    assert "@{" not in json.dumps(document)


@pytest.mark.parametrize("template", [*TEMPLATES, *UNITS], ids=lambda path: path.name)
def test_templates_hold_no_secret_and_no_personal_path(template: Path) -> None:
    text = template.read_text(encoding="utf-8")
    assert not re.search(r"/Users/|/home/|169\.254\.|192\.168\.", text)
    assert not re.search(r"[0-9a-f]{24}", text)
    assert not re.search(r"--(api-key|fleet-psk)\b(?!-file)", text)


@pytest.mark.parametrize("template", [*TEMPLATES, *UNITS], ids=lambda path: path.name)
def test_the_daemons_know_every_flag(template: Path, environment: dict[str, str]) -> None:
    arguments = command_line(template, environment)
    told = subprocess.run([arguments[0], arguments[1], "--help"], capture_output=True, text=True, timeout=60, check=True)
    templated = re.findall(r"--[a-z][a-z-]+", template.read_text(encoding="utf-8"))
    assert [flag for flag in templated if flag not in told.stdout] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_and_an_agent_run_the_same_command(unit: Path, environment: dict[str, str]) -> None:
    commands = [command_line(template, environment) for template in TEMPLATES]
    assert command_line(unit, environment) in commands


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_rendered_units(unit: Path, environment: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / unit.name
    target.write_bytes(render(unit, environment))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--recursive-errors=no", str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr, done.stderr


def test_install_systemd_renders_and_checks(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    done = home.run("install_systemd.sh", "worker", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "ExecStart=" in done.stdout
    assert not (home.home / ".config").exists()
    assert home.run("install_systemd.sh", "worker", "--dry-run", KAKEYA_WORKER_CACHE_GB="much").returncode == 2
    assert home.run("install_systemd.sh", "--dry-run").returncode == 2


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    scripts = sorted(DEPLOY.glob("*.sh"))
    done = subprocess.run(
        ["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True, timeout=60, cwd=PROJECT, check=False
    )
    assert done.returncode == 0, done.stdout


# --- the renderer ---------------------------------------------------------------------------------------------------


def test_variables_defaults_and_switches() -> None:
    values = {"A": "x", "HOME": "/h", "ON": "Yes", "OFF": "0"}
    assert substitute("@{A}/@{B:-y}/@{C:-~/z}", values) == "x/y//h/z"
    assert substitute("@{ON:=--on}@{OFF:=--off}", values) == "--on"
    with pytest.raises(TemplateError, match="B is not set"):
        substitute("@{B}", values)
    with pytest.raises(TemplateError, match="set it to 1 or 0"):
        substitute("@{A:=--on}", values)
    with pytest.raises(TemplateError, match="line break"):
        substitute("@{A}", {"A": "x\ny"})


def test_an_empty_argument_goes_with_its_flag() -> None:
    assert render_arguments(["run", "--a", "@{A:-}", "--b", "@{B:-2}", "@{C:=--c}"], {}) == ["run", "--b", "2"]


_TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30).filter(lambda t: t.strip() == t)


@given(_TEXTS)
def test_no_value_changes_the_structure_of_a_plist(value: str) -> None:
    data = plistlib.dumps({"ProgramArguments": ["p", "--x", "@{V}"], "Label": "@{V}"})
    from deploy.render_service import render_plist

    assert plistlib.loads(render_plist(data, {"V": value})) == {"ProgramArguments": ["p", "--x", value], "Label": value}


@given(_TEXTS)
def test_a_quoted_argument_reads_back_as_itself(value: str) -> None:
    quoted = quote_unit(value)
    text = quoted[1:-1] if quoted.startswith('"') else quoted
    assert re.sub(r"\\(.)", r"\1", text.replace("%%", "%").replace("$$", "$")) == value
    assert quoted.startswith('"') or not re.search(r"\s", quoted)
