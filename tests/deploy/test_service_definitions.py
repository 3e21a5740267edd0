"""What the templates render to: valid property lists and units, without secrets or personal paths."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daemons.environment_names import KNOWN_NAMES
from daemons.service_definitions import definition_files, read_definition
from daemons.unit_files import read_unit
from deploy.render_service import (
    TemplateError,
    command_line,
    render,
    render_arguments,
    render_unit,
    substitute,
)
from deploy.service_environment import script_names
from deploy.service_paths import opened
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
SYSTEMD = Path("/usr/lib/systemd/systemd")


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
def test_a_unit_tries_again_for_ever_and_not_too_often(unit: Path, environment: dict[str, str]) -> None:
    """A port may be taken, or a disk full, for hours."""
    lines = render(unit, environment).decode("utf-8").splitlines()
    top = lines[: lines.index("[Service]")]
    assert "StartLimitIntervalSec=0" in top
    assert not [line for line in lines if line.startswith("StartLimitBurst")]
    assert "Restart=on-failure" in lines
    assert "RestartSec=10" in lines


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
    done = home.run("install_systemd.sh", "worker", "--dry-run", KAKEYA_WORKER_CACHE_GB="much")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith("kakeya: error: --cache-gb is 'much' (a number")) == (2, True), line
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
    assert substitute("@{ON:=--on} @{OFF:=--off} @{NONE:=--none}", values) == "--on --off=0 "
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


def _words(text: str) -> list[str]:
    """As systemd.syntax(7) reads words: quotes, and backslashes that take the next character as it is."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    characters = iter(text)
    for character in characters:
        if character == "\\":
            word = (word or "") + next(characters)
        elif quote:
            quote, word = ("", word) if character == quote else (quote, (word or "") + character)
        elif character in "\"'":
            quote, word = character, word or ""
        elif character in " \t":
            words, word = ([*words, word] if word is not None else words), None
        else:
            word = (word or "") + character
    assert not quote
    return [*words, word] if word is not None else words


_UNIT = """\
[Service]
ExecStart=@{P} \\
    --one \\
    @{V:-} \\
    --two=@{V:-}
Environment="HOME_OF_IT=@{V:-}"
ReadWritePaths="@{V:-}"
WorkingDirectory=/x@{V:-}
StandardOutput=append:/x@{V:-}/log
"""
_AWKWARD = """/a b/"q"/'s'/50%/$HOME/${X}/c\\d;e ö"""


@given(_TEXTS)
@example(_AWKWARD)
@example("/ends in a backslash\\")
@example("; $$ %% \\\\")
def test_every_value_reaches_the_process_of_a_unit_as_it_is(value: str) -> None:
    lines = render_unit(_UNIT, {"P": "/a program/50%/$x", "V": value}).split("\n")
    assert len(lines) == 7, "no value joins or adds lines"
    fields = dict(line.split("=", 1) for line in lines[1:-1])
    program, *arguments = [word.replace("%%", "%") for word in _words(fields["ExecStart"])]
    assert program == "/a program/50%/$x"
    assert [word.replace("$$", "$") for word in arguments] == ["--one", value, f"--two={value}"]
    assert [word.replace("%%", "%") for word in _words(fields["Environment"])] == [f"HOME_OF_IT={value}"]
    assert [word.replace("%%", "%") for word in _words(fields["ReadWritePaths"])] == [value]
    folder = fields["WorkingDirectory"].replace("%%", "%")
    assert folder in (f"/x{value}", f"/x{value}/")
    assert not folder.endswith("\\")
    assert fields["StandardOutput"].replace("%%", "%") == f"append:/x{value}/log"
    read = read_unit("\n".join(lines))
    assert read == ([program, "--one", value, f"--two={value}"], {"HOME_OF_IT": value}), "and so the doctor reads it"


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEMD.exists(), reason="needs systemd itself, and root to leave it to nobody")
def test_systemd_itself_reads_awkward_values_as_they_are() -> None:
    """``systemd --test`` loads the unit and shows what it has understood; it refuses to do so as root."""
    with tempfile.TemporaryDirectory(prefix="kakeya-units-") as folder:
        Path(folder).chmod(0o777)
        unit = Path(folder) / "kakeya-awkward.service"
        unit.write_text(render_unit(_UNIT, {"P": "/bin/echo", "V": _AWKWARD}), encoding="utf-8")
        places = {"XDG_RUNTIME_DIR": folder, "HOME": folder, "SYSTEMD_UNIT_PATH": f"{folder}:"}
        done = subprocess.run(
            [str(SYSTEMD), "--test", "--user", f"--unit={unit.name}"],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **places},
            user=65_534,
            group=65_534,
            extra_groups=(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if done.returncode != 0:
        pytest.skip("systemd --test does not run here")
    told = done.stdout[done.stdout.index(f"Unit {unit.name}:") :]
    assert f"Environment: HOME_OF_IT={_AWKWARD}\n" in told
    assert f"ReadWritePaths: {_AWKWARD}\n" in told
    assert f"WorkingDirectory: /x{_AWKWARD}\n" in told
    assert f"StandardOutputFileToAppend: /x{_AWKWARD}/log\n" in told
    # Shown as a shell would read it; when the process is started "$$" becomes "$".
    (line,) = re.findall(r"Command Line: (/bin/echo --one .*)", told)
    words = shlex.split(line.replace("\\$", "$"))
    assert [word.replace("$$", "$") for word in words[1:]] == ["--one", _AWKWARD, f"--two={_AWKWARD}"]


@pytest.mark.parametrize("own_temporary", [True, False])
def test_a_further_folder_to_write_to_is_read_as_it_is(own_temporary: bool) -> None:
    unit = 'PrivateTmp=yes\nReadWritePaths="/home"\n[Install]\n'
    lines = opened(unit, [Path(_AWKWARD), Path("/ends in a backslash\\")], own_temporary=own_temporary).splitlines()
    fields = [line.partition("=")[2] for line in lines if line.startswith("ReadWritePaths=")]
    paths = [word.replace("%%", "%") for field in fields for word in _words(field)]
    assert paths == ["/home", _AWKWARD, "/ends in a backslash\\", *([] if own_temporary else ["/tmp", "/var/tmp"])]
    assert lines[0] == f"PrivateTmp={'yes' if own_temporary else 'no'}"
    assert lines[-1] == "[Install]"


def test_a_program_that_systemd_would_refuse_is_refused_first() -> None:
    with pytest.raises(TemplateError, match="quote or backslash"):
        render_unit(_UNIT, {"P": '/a"b/kakeya', "V": "x"})


# --- what a definition leaves to kakeya.toml ------------------------------------------------------------------------------


def test_every_variable_of_the_scripts_is_a_known_one() -> None:
    assert script_names() - KNOWN_NAMES == set()


@pytest.mark.parametrize("template", [*TEMPLATES, *UNITS], ids=lambda path: path.name)
def test_a_definition_pins_what_its_user_gave_and_nothing_else(
    template: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / template.name
    target.write_bytes(render(template, environment))
    service = read_definition(target)
    given = {
        "primary": {"model"},
        "worker": {"node_id", "advertise", "model"},
        "cache": {"node_id", "advertise"},
        "dashboard": set[str](),
    }
    assert set(service.flags) == given[service.role]
    if service.role == "dashboard":
        return
    home = Path(service.environment["KAKEYA_HOME"])
    (home / "kakeya.toml").write_text('bind = "127.0.0.1:1"\ncache_gb = 3\n', encoding="utf-8")
    resolved = service.settings()
    assert (resolved.settings.bind, resolved.settings.cache_gb) == ("127.0.0.1:1", 3.0)
    assert (resolved.origins["bind"], resolved.origins["cache_gb"]) == ("file", "file")
    (home / "kakeya.toml").unlink()
    settings = service.settings().settings
    assert settings.bind.startswith("0.0.0.0:")
    assert settings.node_id == environment.get(f"KAKEYA_{service.role.upper()}_NODE_ID", "head-runtime")
    assert (settings.sink, settings.window) == (4, 2048), "alike on all nodes"


def test_a_switch_that_is_turned_off_stays_off_whatever_the_file_says(environment: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "ai.kakeya.zmq-runtime-prefill.plist"
    (template,) = [each for each in TEMPLATES if each.name == target.name]
    home = Path(environment["HOME"]) / ".kakeya"
    for value, expected in {"": True, "1": True, "0": False}.items():
        target.write_bytes(render(template, {**environment, "KAKEYA_ENABLE_PREFILL_CACHE": value}))
        assert read_definition(target).settings().settings.enable_prefill_cache is expected
    (home / "kakeya.toml").write_text("enable_prefill_cache = true\n", encoding="utf-8")
    assert read_definition(target).settings().settings.enable_prefill_cache is False


def test_a_user_without_a_home_folder_has_no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_knows() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("KAKEYA_LAUNCH_AGENTS", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody_knows)
    assert definition_files() == []
