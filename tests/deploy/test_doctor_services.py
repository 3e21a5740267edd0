"""Faults of installed services are planted, and `kakeya doctor` finds each and names the remedy."""

from __future__ import annotations

import json
import os
import plistlib
import re
from pathlib import Path

import pytest

from daemons.doctor.finding import Level
from daemons.doctor.services import judge_unit
from daemons.service_definitions import AGENTS, INSTALL_COMMANDS, REQUIRED, UNITS
from daemons.unit_files import read_time_span, stop_seconds
from tests.deploy.doctor_rig import Doctor
from tests.deploy.service_rig import DEPLOY, PROJECT
from tests.fleet_rig import run_kakeya

WORKERS = ["ai.kakeya.prefill-worker.plist", "kakeya-worker.service"]

# --- what a definition says wins over kakeya.toml -------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKERS)
def test_a_definition_that_says_otherwise_than_the_file(doctor: Doctor, name: str) -> None:
    doctor.install(name, KAKEYA_WORKER_CACHE_GB="8", KAKEYA_WORKER_NETWORK="thunderbolt")
    (doctor.home / "kakeya.toml").write_text('[worker]\ncache_gb = 16\nnetwork = "thunderbolt"\nwindow = 512\n')
    found = doctor.one("runs with --cache-gb 8.0, and the configuration file says 16.0")
    assert (found["level"], found["subject"]) == ("warning", "services")
    assert "take cache_gb out of" in found["remedy"]
    assert "without the variable for --cache-gb" in found["remedy"]
    rows = [row for row in doctor.findings() if "the configuration file says" in row["text"]]
    assert len(rows) == 1, "only what differs"
    done = run_kakeya("config", "show", "--role", "worker", "--json", home=doctor.home, environment=doctor.places)
    assert done.returncode == 0, done.stderr
    (service,) = json.loads(done.stdout.splitlines()[-1])["services"].values()
    settings = service["settings"]
    assert {key: (settings[key]["value"], settings[key]["from"]) for key in ("cache_gb", "window", "bind", "drain_s")} == {
        "cache_gb": (8.0, "service definition"),
        "window": (512, "file"),
        "bind": ("0.0.0.0:53051", "service default"),
        "drain_s": (20.0, "default"),
    }
    assert "wins over cache_gb = 16.0" in done.stderr


def test_a_value_that_an_install_script_needs_cannot_be_left_out_of_its_definition(doctor: Doctor) -> None:
    doctor.install("kakeya-worker.service")
    (doctor.home / "kakeya.toml").write_text('[worker]\nnode_id = "another"\n')
    found = doctor.one("runs with --node-id w, and the configuration file says another")
    assert "with its value in KAKEYA_WORKER_NODE_ID" in found["remedy"]
    assert "without the variable" not in found["remedy"]


def test_the_doctor_knows_what_install_scripts_need() -> None:
    scripts = [script.read_text(encoding="utf-8") for script in DEPLOY.glob("install_*.sh")]
    needed = {name for text in scripts for name in re.findall(r"need (KAKEYA_\w+)", text)}
    assert needed == {variable for settings in REQUIRED.values() for variable in settings.values()}


def test_a_definition_that_its_daemon_would_refuse(doctor: Doctor) -> None:
    doctor.install("kakeya-worker.service", KAKEYA_WORKER_CACHE_GB="much")
    assert "--cache-gb" in doctor.one("kakeya-worker: --cache-gb is 'much'")["text"]
    shown = run_kakeya("config", "show", "--role", "worker", home=doctor.home, environment=doctor.places)
    assert (shown.returncode, "warning: kakeya-worker: --cache-gb is 'much'" in shown.stdout) == (0, True)
    (doctor.units / "kakeya-worker.service").write_text("[Service]\n")
    assert "install" in doctor.one("cannot be read")["remedy"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"<?xml version='1.0'?><plist><dict>", plistlib.dumps([1]), plistlib.dumps({})]
)
def test_an_agent_that_is_damaged(doctor: Doctor, content: bytes) -> None:
    doctor.install("ai.kakeya.prefill-worker.plist").write_bytes(content)
    assert "run its install script again" in doctor.one("prefill-worker.plist cannot be read")["remedy"]


def test_a_service_is_judged_by_what_it_runs_with(doctor: Doctor) -> None:
    """And not by what its role would have in this shell: here its tenant, its model and its peer."""
    doctor.install("kakeya-worker.service", KAKEYA_TENANT_ID="private-fleet", KAKEYA_WORKER_PEER="127.0.0.1:1")
    found = doctor.findings()
    texts = [row["text"] for row in found]
    assert any("of kakeya-worker, as it is installed" in text for text in texts)
    assert "there is no key of the tenant private-fleet here" in texts
    assert any(row["subject"] == "model" and str(doctor.home / "model") in row["text"] for row in found), found
    assert "nothing listens at 127.0.0.1:1" in texts


# --- programs that are gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{name}.plist" for name in AGENTS] + [f"{name}.service" for name in UNITS])
def test_a_service_whose_virtual_environment_was_removed(doctor: Doctor, name: str) -> None:
    doctor.install(name)
    assert not [row for row in doctor.about("services") if " starts " in row["text"]]
    program = doctor.program()
    program.rename(program.with_name("moved"))
    found = doctor.one(f"{Path(name).stem} starts {program}, which does not exist")
    assert (found["level"], found["subject"]) == ("problem", "services")
    assert f"run its install script again: {INSTALL_COMMANDS[Path(name).stem]}" in found["remedy"]


def test_a_program_that_cannot_be_started(doctor: Doctor) -> None:
    doctor.install("kakeya-worker.service")
    program = doctor.program()
    program.chmod(0o644)
    assert "install_systemd.sh worker" in doctor.one(f"kakeya-worker starts {program}, which is no program")["remedy"]
    program.unlink()
    program.mkdir()
    assert doctor.one(f"kakeya-worker starts {program}, which is no program")


@pytest.mark.parametrize("head", ["#!{python}", "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''"])
def test_a_command_whose_python_was_removed(doctor: Doctor, head: str, tmp_path: Path) -> None:
    """As after an upgrade that took the Python away which a virtual environment was made with: its link leads nowhere."""
    python, program = tmp_path / "python", tmp_path / "kakeya"
    program.write_text(head.format(python=python) + "\n")
    program.chmod(0o755)
    doctor.install("kakeya-worker.service", KAKEYA_WORKER_COMMAND=str(program))
    python.symlink_to(tmp_path / "gone")
    found = doctor.one(f"kakeya-worker starts {program}, whose interpreter {python} does not exist")
    assert "install_systemd.sh worker" in found["remedy"]
    python.unlink()
    python.touch()
    assert not [row for row in doctor.about("services") if " starts " in row["text"]]


def test_a_program_that_the_service_manager_looks_for_is_not_judged(doctor: Doctor) -> None:
    doctor.install("kakeya-worker.service", KAKEYA_WORKER_COMMAND="kakeya")
    assert not [row for row in doctor.about("services") if " starts " in row["text"]]


@pytest.mark.parametrize("name", WORKERS)
def test_a_role_that_there_is_none_of(doctor: Doctor, name: str) -> None:
    definition = doctor.install(name)
    definition.write_text(re.sub(r"([> ])worker([< ])", r"\1wroker\2", definition.read_text()))
    (found,) = [row for row in doctor.about("services") if row["level"] == "problem" and "wroker" in row["text"]]
    assert found["text"] == f"{Path(name).stem} starts `kakeya wroker`, which is none of primary, worker, cache, dashboard"
    assert "run its install script again" in found["remedy"]


@pytest.mark.parametrize("name", [f"{name}.plist" for name in AGENTS] + [f"{name}.service" for name in UNITS])
def test_a_service_whose_folder_was_removed(doctor: Doctor, name: str) -> None:
    """That of its logs and of what it does is the same one here: one fault."""
    folder = doctor.home.parent / "another 50% home"
    folder.mkdir()
    doctor.install(name, KAKEYA_HOME=str(folder))
    assert not [row for row in doctor.about("services") if "which is no folder" in row["text"]]
    folder.rmdir()
    (found,) = [row for row in doctor.about("services") if "which is no folder" in row["text"]]
    assert found["level"] == "problem"
    assert found["text"].startswith(f"{Path(name).stem} writes its log to {folder}, which is no folder")
    assert f"mkdir -p '{folder}'" in found["remedy"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("StandardOutput=journal\nStandardError=inherit\n", []),
        ("StandardOutput=append:%h/log\nWorkingDirectory=~\nStandardError=\n", []),
        ("StandardOutput = file:/nowhere/1/log\nStandardError=append:/nowhere/2/log\n", ["/nowhere/1", "/nowhere/2"]),
    ],
)
def test_logs_that_a_unit_writes_elsewhere(doctor: Doctor, lines: str, told: list[str]) -> None:
    own = doctor.install("kakeya-worker.service").with_name("kakeya-worker.service.d")
    own.mkdir()
    (own / "override.conf").write_text(f"[Service]\n{lines}")
    rows = [row["text"] for row in doctor.about("services") if "which is no folder" in row["text"]]
    assert [text.split(", which")[0] for text in rows] == [f"kakeya-worker writes its log to {folder}" for folder in told]


def test_every_definition_has_a_script_that_installs_it() -> None:
    assert set(INSTALL_COMMANDS) == {*AGENTS, *UNITS}
    for name, command in INSTALL_COMMANDS.items():
        _, script, *arguments = command.split()
        text = (PROJECT / script).read_text(encoding="utf-8")
        assert name in text or f"{arguments[0]})" in text, name
        assert all(word in text for word in arguments), "as its help says"


# --- draining ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize(("drain_s", "told"), [(44, False), (45, True), (60, True)])
def test_a_drain_that_the_service_manager_cuts_off(doctor: Doctor, name: str, drain_s: int, told: bool) -> None:
    doctor.install(name)
    file = doctor.home / "kakeya.toml"
    file.write_text(f"drain_s = {drain_s}\n{file.read_text()}")
    words = f"{Path(name).stem} may take {drain_s} s to drain (drain_s), and its definition has it killed after 45 s"
    rows = [row for row in doctor.findings() if "to drain" in row["text"]]
    assert [(row["level"], row["subject"], row["text"]) for row in rows] == [("warning", "services", words)] * told
    assert all(f"set drain_s to less than 45 in {file}" in row["remedy"] for row in rows)


def test_a_definition_that_leaves_less_than_the_usual_drain(doctor: Doctor) -> None:
    agent, unit = doctor.install(WORKERS[0]), doctor.install(WORKERS[1])
    for seconds, told in ((10, 2), (0, 0), (30, 0)):
        document = plistlib.loads(agent.read_bytes())
        agent.write_bytes(plistlib.dumps({**document, "ExitTimeOut": seconds}))
        unit.write_text(re.sub(r"TimeoutStopSec=.*", f"TimeoutStopSec={seconds}", unit.read_text()))
        rows = [row for row in doctor.findings() if "may take 20 s to drain" in row["text"]]
        assert len(rows) == told, f"{seconds} s; 0 is for ever"
    del document["ExitTimeOut"]
    agent.write_bytes(plistlib.dumps(document))
    assert not [row for row in doctor.findings() if "to drain" in row["text"]], "what the system does then is not known"


def test_what_systemctl_edit_puts_beside_a_unit_counts(doctor: Doctor) -> None:
    unit = doctor.install("kakeya-worker.service")
    (doctor.home / "kakeya.toml").write_text("drain_s = 60\n")
    assert doctor.one("may take 60 s to drain")
    own = unit.with_name("kakeya-worker.service.d")
    own.mkdir()
    (own / "override.conf").write_text("[Service]\nTimeoutStopSec=1min 30s\n")
    assert not [row for row in doctor.findings() if "to drain" in row["text"]]
    (own / "override.conf").write_text("[Service]\nTimeoutStopSec=90\nExecStart=\nExecStart=/nowhere/kakeya worker\n")
    assert doctor.one("kakeya-worker starts /nowhere/kakeya, which does not exist")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45),
        ("45s", 45),
        ("2min", 120),
        ("1min 30s", 90),
        ("1h30min", 5400),
        ("1500ms", 1.5),
        ("infinity", float("inf")),
    ],
)
def test_time_spans_of_systemd(text: str, seconds: float) -> None:
    assert read_time_span(text) == seconds
    assert stop_seconds(f"[Service]\nTimeoutStopSec={text}\n") == (None if text == "infinity" else seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "-5", "5 5 x"])
def test_what_is_no_time_span_changes_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="no time span"):
        read_time_span(text)
    assert stop_seconds(f"TimeoutSec=7\nTimeoutStopSec={text}\n") == 7


# --- ports ---------------------------------------------------------------------------------------------------------------


def _shared(doctor: Doctor) -> list[dict[str, str]]:
    return [row for row in doctor.about("services") if "use the same port" in row["text"]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ai.kakeya.prefill-worker.plist", "ai.kakeya.prefill-network-peer.plist"),
        ("kakeya-worker.service", "kakeya-cache.service"),
    ],
)
def test_two_services_at_one_port(doctor: Doctor, one: str, other: str) -> None:
    doctor.install(one)
    doctor.install(other, KAKEYA_CACHE_BIND="127.0.0.1:53051")
    (doctor.home / "kakeya.toml").unlink()
    (found,) = _shared(doctor)
    first, second = sorted((Path(one).stem, Path(other).stem), key=[*AGENTS, *UNITS].index)
    assert (found["level"], found["text"]) == ("warning", f"{first} (--bind) and {second} (--bind) use the same port 53051")
    assert "give one of them another" in found["remedy"]
    doctor.install(other, KAKEYA_CACHE_BIND="127.0.0.1:53052")
    assert not _shared(doctor)


def test_a_port_at_the_top_of_the_file_is_for_every_service(doctor: Doctor) -> None:
    (doctor.home / "kakeya.toml").write_text("runtime_health_port = 8091\n")
    for name in ("kakeya-runtime.service", "kakeya-worker.service", "kakeya-cache.service"):
        doctor.install(name)
    (found,) = _shared(doctor)
    assert "kakeya-runtime (--runtime-health-port) and kakeya-worker (--runtime-health-port)" in found["text"]


def test_a_dashboard_at_the_port_of_a_daemon(doctor: Doctor) -> None:
    doctor.install("kakeya-runtime.service")
    doctor.install("kakeya-dashboard.service", KAKEYA_NETWORK_HTTP_HOST="localhost", KAKEYA_NETWORK_HTTP_PORT="8091")
    (found,) = _shared(doctor)
    assert "kakeya-runtime (--runtime-health-port) and kakeya-dashboard (--bind) use the same port 8091" in found["text"]


def test_one_port_of_two_addresses_or_of_two_service_managers_is_no_fault(doctor: Doctor) -> None:
    (doctor.home / "kakeya.toml").unlink()
    doctor.install("kakeya-worker.service", KAKEYA_WORKER_BIND="127.0.0.1:53051")
    doctor.install("kakeya-cache.service", KAKEYA_CACHE_BIND="127.0.0.2:53051")
    doctor.install("ai.kakeya.prefill-worker.plist")
    assert not _shared(doctor)


# --- what the service managers say ---------------------------------------------------------------------------------------


def test_an_agent_that_is_not_loaded_or_died(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, agents = tmp_path / "bin", tmp_path / "agents"
    programs.mkdir()
    agents.mkdir()
    for name in ("ai.kakeya.prefill-worker", "ai.kakeya.prefill-network"):
        (agents / f"{name}.plist").touch()
    fake = programs / "launchctl"
    died = 'printf "\\tstate = not running\\n\\tlast exit code = 4\\n"'
    fake.write_text(f'#!/bin/sh\ncase "$2" in *worker) {died} ;; *) exit 113 ;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    found = doctor.findings()
    texts = {row["text"]: row["remedy"] for row in found if row["subject"] == "services"}
    assert "launchctl bootstrap" in texts["ai.kakeya.prefill-network is installed and not loaded"]
    assert "kakeya logs" in texts["ai.kakeya.prefill-worker does not run, its last exit code is 4"]


def test_units_of_systemd() -> None:
    assert judge_unit("kakeya-worker", 0, "active").level is Level.OK
    assert "systemctl --user restart kakeya-worker" in judge_unit("kakeya-worker", 3, "failed").remedy
    assert judge_unit("kakeya-worker", -1, "").level is Level.WARNING
