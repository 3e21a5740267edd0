"""The launchd install scripts, run for real against a stand-in for launchctl."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from daemons.service_definitions import read_definition
from tests.deploy.service_rig import DEPLOY, Home, make_home

SCRIPTS = {
    "install_prefill_worker_launchd.sh": "ai.kakeya.prefill-worker",
    "install_runtime_launchd.sh": "ai.kakeya.zmq-runtime-prefill",
    "install_prefill_network_launchd.sh": "ai.kakeya.prefill-network",
}
WORKER = "install_prefill_worker_launchd.sh"
LABEL = SCRIPTS[WORKER]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path)


def _arguments(home: Home, label: str) -> list[str]:
    arguments: list[str] = plistlib.loads((home.agents / f"{label}.plist").read_bytes())["ProgramArguments"]
    return arguments


def _domain() -> str:
    return f"gui/{os.getuid()}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_first_install_bootstraps_and_kickstarts(home: Home, script: str) -> None:
    label = SCRIPTS[script]
    done = home.run(script)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    target = home.agents / f"{label}.plist"
    assert home.calls[-2:] == [f"bootstrap {_domain()} {target}", f"kickstart {_domain()}/{label}"]
    assert not any(call.startswith("bootout") for call in home.calls)
    assert plistlib.loads(target.read_bytes())["Label"] == label


def test_the_cache_peer_has_an_agent_of_its_own(home: Home) -> None:
    done = home.run("install_prefill_network_launchd.sh", "--cache-peer")
    assert done.returncode == 0, done.stderr
    assert _arguments(home, "ai.kakeya.prefill-network-peer")[1] == "cache"


def test_the_same_again_only_restarts(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    home.forget_calls()
    done = home.run(WORKER)
    assert done.returncode == 0, done.stderr
    assert home.calls == [f"print {_domain()}/{LABEL}", f"kickstart -k {_domain()}/{LABEL}"]


def test_a_changed_value_replaces_what_runs_once_it_is_gone(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    home.forget_calls()
    home.plan("slow-bootout", 5)
    done = home.run(WORKER, KAKEYA_WORKER_CACHE_GB="6")
    assert done.returncode == 0, done.stderr
    verbs = [call.split()[0] for call in home.calls]
    assert verbs.count("bootout") == 1
    assert verbs[verbs.index("bootout") :].count("print") >= 5
    assert verbs[-2:] == ["bootstrap", "kickstart"]
    arguments = _arguments(home, LABEL)
    assert arguments[arguments.index("--cache-gb") + 1] == "6"


def test_bootstrap_is_tried_three_times(home: Home) -> None:
    home.plan("refuse-bootstrap", 2)
    assert home.run(WORKER).returncode == 0
    assert [call.split()[0] for call in home.calls].count("bootstrap") == 3


def test_a_refusal_for_good_is_one_line(home: Home) -> None:
    home.plan("refuse-bootstrap", 3)
    done = home.run(WORKER)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    trouble, _, remedy = line.partition(" three times: ")
    assert trouble.startswith("kakeya: error: launchd refuses ")
    # It can be pasted into a shell, whatever the folder is called.
    assert shlex.split(remedy.removesuffix(" says why")) == [
        "launchctl",
        "bootstrap",
        _domain(),
        str(home.agents / f"{LABEL}.plist"),
    ]


def test_a_definition_that_is_refused_gives_way_to_the_one_before(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    before = (home.agents / f"{LABEL}.plist").read_bytes()
    home.plan("refuse-bootstrap", 3)
    done = home.run(WORKER, KAKEYA_WORKER_CACHE_GB="6")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kakeya: error: launchd refuses {LABEL} three times with the new definition")
    assert line.endswith("the old one is back and runs")
    assert {path.name: path.read_bytes() for path in home.agents.iterdir()} == {f"{LABEL}.plist": before}
    assert (home.home / "launchd" / f"loaded-{LABEL}").exists()
    assert home.calls[-1] == f"kickstart {_domain()}/{LABEL}"


def test_neither_of_two_definitions_is_taken(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    before = (home.agents / f"{LABEL}.plist").read_bytes()
    home.plan("refuse-bootstrap", 6)
    done = home.run(WORKER, KAKEYA_WORKER_CACHE_GB="6")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the old one is back, and does not run either: launchctl bootstrap" in line
    assert (home.agents / f"{LABEL}.plist").read_bytes() == before


def test_what_was_not_loaded_stays_so_when_the_new_definition_is_refused(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    before = (home.agents / f"{LABEL}.plist").read_bytes()
    (home.home / "launchd" / f"loaded-{LABEL}").unlink()
    home.plan("refuse-bootstrap", 3)
    done = home.run(WORKER, KAKEYA_WORKER_CACHE_GB="6")
    assert (done.returncode, done.stderr.rstrip().endswith("the old one is back")) == (1, True)
    assert (home.agents / f"{LABEL}.plist").read_bytes() == before
    assert not (home.home / "launchd" / f"loaded-{LABEL}").exists()


def test_a_second_fleet_does_not_take_the_place_of_the_first_without_a_word(home: Home) -> None:
    first = home.home / ".kakeya"
    second = Path(shutil.copytree(first, home.home / "second"))
    assert home.run(WORKER, KAKEYA_HOME=str(second)).returncode == 0
    before = (home.agents / f"{LABEL}.plist").read_bytes()
    home.forget_calls()
    for arguments in ((), ("--dry-run",)):
        done = home.run(WORKER, *arguments)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert f"{LABEL}.plist is installed for the home {second}, and this one is for {first}" in line
        assert "uninstall_launchd.sh" in line
        assert "--replace" in line
    assert (home.agents / f"{LABEL}.plist").read_bytes() == before
    assert home.calls == []
    assert home.run(WORKER, "--replace").returncode == 0
    assert plistlib.loads((home.agents / f"{LABEL}.plist").read_bytes())["WorkingDirectory"] == str(first)
    (home.agents / f"{LABEL}.plist").write_bytes(b"no property list")
    assert home.run(WORKER).returncode == 0, "what nobody can read is replaced"


def test_a_dry_run_touches_nothing(home: Home) -> None:
    before = sorted(home.home.rglob("*"))
    done = home.run(WORKER, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert plistlib.loads(done.stdout.encode())["Label"] == LABEL
    assert sorted(home.home.rglob("*")) == before
    assert home.calls == []


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        (WORKER, "KAKEYA_WORKER_NODE_ID"),
        (WORKER, "KAKEYA_WORKER_MODEL"),
        (WORKER, "KAKEYA_WORKER_ADVERTISE"),
        ("install_runtime_launchd.sh", "KAKEYA_RUNTIME_MODEL"),
    ],
)
def test_missing_input_is_one_line_and_exit_code_2(home: Home, script: str, missing: str) -> None:
    done = home.run(script, **{missing: ""})
    assert done.returncode == 2
    assert missing in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert home.calls == []


def test_a_missing_or_open_key_is_refused(home: Home) -> None:
    psk = home.home / ".kakeya" / "fleet.psk"
    psk.chmod(0o644)
    done = home.run(WORKER)
    assert (done.returncode, "chmod 600" in done.stderr) == (2, True)
    psk.unlink()
    assert home.run(WORKER).returncode == 2
    (home.home / ".kakeya" / "network_api_key").unlink()
    done = home.run("install_prefill_network_launchd.sh")
    assert (done.returncode, "openssl rand" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KAKEYA_WORKER_CACHE_GB", "much"),
        ("KAKEYA_WORKER_ADVERTISE", "no-port"),
        ("KAKEYA_WORKER_ADVERTISE", "0.0.0.0:53051"),
        ("KAKEYA_WORKER_ADAPTIVE_CACHE", "perhaps"),
        ("KAKEYA_WORKER_PEER", "a\nb"),
        ("KAKEYA_CACHE_COMPRESSION", "lzma"),
        ("KAKEYA_CACHE_FORMAT_VERSION", "kakeya-prefill-v3-kl-d4-q38"),
        ("KAKEYA_WORKER_PYTHON", "/nonexistent/python"),
    ],
)
def test_an_unusable_value_is_refused_before_anything_is_touched(home: Home, variable: str, value: str) -> None:
    done = home.run(WORKER, **{variable: value})
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("kakeya: error: ")
    assert home.calls == []
    assert not home.agents.exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("#!/nonexistent/python", "cannot be run: No such file or directory"),
        ("#!/bin/sh\nexit 1", "cannot check the settings, and does not say why"),
        (
            "#!/bin/sh\nprintf 'Traceback:\\n  line 3\\nImportError: no zmq\\n' >&2; exit 1",
            "kakeya: error: ImportError: no zmq",
        ),
    ],
)
def test_a_command_that_cannot_check_the_settings_is_one_line(home: Home, program: str, words: str) -> None:
    folder = home.home / "broken"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    command = folder / "kakeya"
    command.write_text(program + "\n", encoding="utf-8")
    command.chmod(0o755)
    done = home.run(WORKER, "--dry-run", KAKEYA_WORKER_PYTHON=str(folder / "python"))
    (line,) = done.stderr.splitlines()
    assert (done.returncode, words in line) == (2, True), line


def test_the_runbook_values_work_as_written(home: Home) -> None:
    done = home.run(
        WORKER,
        KAKEYA_CACHE_MODEL_ID="gemma-4-26B-A4B-it-mlx-4bit",
        KAKEYA_MODEL_REVISION="local-4bit-v1",
        KAKEYA_TOKENIZER_REVISION="gemma4-v1",
        KAKEYA_LAYER_GEOMETRY_HASH="00ff",
        KAKEYA_WORKER_SINK="4",
        KAKEYA_WORKER_WINDOW="2048",
        KAKEYA_WORKER_CACHE_GB="8",
        KAKEYA_WORKER_CACHE_MIN_GB="0.25",
        KAKEYA_WORKER_MEMORY_RESERVE_GB="2",
        KAKEYA_WORKER_ADAPTIVE_CACHE="1",
        KAKEYA_CACHE_BLOCK_TOKENS="64",
        KAKEYA_CACHE_FORMAT_VERSION="kakeya-prefill-v3-kl-d4-q38",
        KAKEYA_CACHE_COMPRESSION="kakeyalattice-d4",
        KAKEYA_WORKER_NETWORK="thunderbolt",
        KAKEYA_WORKER_PRIORITY="100",
        KAKEYA_WORKER_RTT_MS="0.55",
        KAKEYA_WORKER_PEER="169.254.187.239:51051",
        KAKEYA_FLEET_PSK_FILE=str(home.home / ".kakeya" / "fleet.psk"),
        KAKEYA_TENANT_ID="private-fleet",
    )
    assert done.returncode == 0, done.stderr
    arguments = _arguments(home, LABEL)
    for flag, value in {
        "--model-id": "gemma-4-26B-A4B-it-mlx-4bit",
        "--revision-label": "local-4bit-v1/gemma4-v1",
        "--assert-compatibility": "layer_geometry_hash=00ff",
        "--cache-compression": "kakeyalattice-d4",
        "--peer": "169.254.187.239:51051",
        "--tenant-id": "private-fleet",
        "--network": "thunderbolt",
    }.items():
        assert arguments[arguments.index(flag) + 1] == value
    assert "--adaptive-cache" in arguments


def test_what_the_installer_is_not_told_is_left_to_the_file(home: Home) -> None:
    """Editing kakeya.toml and restarting changes what a service does, without installing it again."""
    toml = home.home / ".kakeya" / "kakeya.toml"
    toml.write_text("cache_gb = 5\n[worker]\ncache_gb = 6\nwindow = 1024\n", encoding="utf-8")
    done = home.run(WORKER)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    service = read_definition(home.agents / f"{LABEL}.plist")
    assert set(service.flags) == {"node_id", "advertise", "model"}
    settings = service.settings().settings
    assert (settings.cache_gb, settings.window, settings.bind) == (6.0, 1024, "0.0.0.0:53051")
    toml.write_text('[worker]\ncache_gb = 7\nbind = "192.0.2.21:53051"\n', encoding="utf-8")
    settings = service.settings().settings
    assert (settings.cache_gb, settings.window, settings.bind) == (7.0, 2048, "192.0.2.21:53051")


def test_what_is_given_wins_over_the_file_and_is_told(home: Home) -> None:
    toml = home.home / ".kakeya" / "kakeya.toml"
    toml.write_text('[worker]\ncache_gb = 16\nnetwork = "lan"\n', encoding="utf-8")
    done = home.run(WORKER, "--dry-run", KAKEYA_WORKER_CACHE_GB="8", KAKEYA_WORKER_NETWORK="lan")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "warning" in line]
    assert told == ["kakeya: warning: --cache-gb 8.0 wins over cache_gb = 16.0 in the configuration file"]


def test_settings_are_checked_as_the_service_will_see_them(home: Home) -> None:
    """Variables of the shell that installs do not reach the service, so they neither break nor mend it."""
    assert home.run(WORKER, "--dry-run", KAKEYA_CACHE_GB="much").returncode == 0
    (home.home / ".kakeya" / "kakeya.toml").write_text("cache_gb = 9999\n", encoding="utf-8")
    assert home.run(WORKER, "--dry-run", KAKEYA_CACHE_GB="4").returncode == 2


def test_a_fleet_key_that_the_file_names_is_the_one_that_counts(home: Home) -> None:
    psk = home.home / ".kakeya" / "fleet.psk"
    (home.home / "keys").mkdir(mode=0o700)
    elsewhere = psk.rename(home.home / "keys" / "own.psk")
    assert home.run(WORKER, "--dry-run").returncode == 2
    toml = home.home / ".kakeya" / "kakeya.toml"
    toml.write_text(f'fleet_psk_file = "{elsewhere}"\n', encoding="utf-8")
    done = home.run(WORKER, "--dry-run")
    assert done.returncode == 0, done.stderr
    elsewhere.chmod(0o644)
    assert home.run(WORKER, "--dry-run").returncode == 2


@pytest.mark.parametrize("prefix", ["KAKEYA_NETWORK", "KAKEYA_DASHBOARD"])
def test_a_dashboard_for_other_machines_can_be_installed(home: Home, prefix: str) -> None:
    where = {"KAKEYA_NETWORK_HTTP_HOST": "0.0.0.0"} if prefix == "KAKEYA_NETWORK" else {f"{prefix}_BIND": "0.0.0.0:8090"}
    names = {f"{prefix}_ALLOW_HOST": "fleet.example, kakeya.example"}
    done = home.run("install_prefill_network_launchd.sh", **where, **names)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    arguments = _arguments(home, "ai.kakeya.prefill-network")
    assert arguments[arguments.index("--bind") + 1] == "0.0.0.0:8090"
    assert arguments[arguments.index("--allow-host") + 1] == "fleet.example, kakeya.example"
    refused = home.run("install_prefill_network_launchd.sh", **{f"{prefix}_ALLOW_HOST": "https://fleet.example/"})
    assert (refused.returncode, "--allow-host NAME" in refused.stderr) == (2, True)


@pytest.mark.parametrize("bind", ["8099", "foo:", ":8090", "[::1]"])
def test_an_address_of_the_dashboard_that_is_none_is_refused(home: Home, bind: str) -> None:
    done = home.run("install_prefill_network_launchd.sh", KAKEYA_DASHBOARD_BIND=bind)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "KAKEYA_DASHBOARD_BIND is not an address: write host:port" in done.stderr
    assert not home.agents.exists()


def test_a_default_of_the_installer_gives_way_to_a_smaller_store(home: Home) -> None:
    """The settings are checked as the daemon resolves them, which ends at once where they contradict each other."""
    wanted = {"KAKEYA_WORKER_CACHE_GB": "0.5", "KAKEYA_WORKER_ADAPTIVE_CACHE": "1"}
    done = home.run(WORKER, "--dry-run", **wanted)
    assert done.returncode == 0, done.stderr
    refused = home.run(WORKER, "--dry-run", **wanted, KAKEYA_WORKER_CACHE_MIN_GB="1")
    assert (refused.returncode, "cache_min_gb 1 is larger than cache_gb 0.5" in refused.stderr) == (2, True)


def test_uninstall_removes_all_and_keeps_keys(home: Home) -> None:
    for script in SCRIPTS:
        assert home.run(script).returncode == 0
    assert home.run("uninstall_launchd.sh", "--dry-run").returncode == 0
    assert len(list(home.agents.iterdir())) == 3
    done = home.run("uninstall_launchd.sh")
    assert done.returncode == 0, done.stderr
    assert list(home.agents.iterdir()) == []
    assert (home.home / ".kakeya" / "fleet.psk").exists()
    assert home.run("uninstall_launchd.sh").returncode == 0


def _let_cp_fail(home: Home) -> None:
    """As on a full disk: half a file, a line on standard error, and exit code 1."""
    program = home.home / "bin" / "cp"
    program.write_text(
        '#!/bin/sh\nhead -c 100 "$1" >"$2"\necho "cp: $2: No space left on device" >&2\nexit 1\n', encoding="utf-8"
    )
    program.chmod(0o755)


@pytest.mark.parametrize("installed", [True, False])
def test_a_definition_that_cannot_be_written_leaves_what_runs(home: Home, installed: bool) -> None:
    if installed:
        assert home.run(WORKER).returncode == 0
    before = {path: path.read_bytes() for path in home.agents.glob("*")}
    home.forget_calls()
    _let_cp_fail(home)
    done = home.run(WORKER, KAKEYA_WORKER_CACHE_GB="6")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line
    assert {path: path.read_bytes() for path in home.agents.glob("*")} == before
    assert not {call.split()[0] for call in home.calls} - {"print"}


def test_what_does_not_stop_keeps_its_definition(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    before = {path: path.read_bytes() for path in home.agents.glob("*")}
    home.plan("slow-bootout", 1000)
    done = home.run(WORKER, KAKEYA_WORKER_CACHE_GB="6", KAKEYA_INSTALL_WAIT_S="0")
    assert done.returncode == 1
    assert "does not stop" in done.stderr
    assert {path: path.read_bytes() for path in home.agents.glob("*")} == before


def test_a_definition_that_cannot_be_replaced_is_loaded_again(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    before = (home.agents / f"{LABEL}.plist").read_bytes()
    program = home.home / "bin" / "mv"
    program.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    done = home.run(WORKER, KAKEYA_WORKER_CACHE_GB="6")
    assert done.returncode == 1
    assert "cannot be replaced" in done.stderr
    assert [path.name for path in home.agents.iterdir()] == [f"{LABEL}.plist"]
    assert (home.agents / f"{LABEL}.plist").read_bytes() == before
    assert (home.home / "launchd" / f"loaded-{LABEL}").exists()


def test_folders_in_the_way_are_one_line(home: Home) -> None:
    (home.agents / f"{LABEL}.plist").mkdir(parents=True)
    done = home.run(WORKER)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "is a folder" in done.stderr
    done = home.run(WORKER, KAKEYA_LAUNCH_AGENTS=str(home.home / "bin" / "launchctl" / "agents"))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "cannot be made" in done.stderr
    assert not any(call.startswith("boot") for call in home.calls)


def test_relative_paths_become_absolute(home: Home) -> None:
    (home.home / "own.toml").write_text("drain_s = 7\n", encoding="utf-8")
    relative = {
        "KAKEYA_WORKER_MODEL": "../models/tiny",
        "KAKEYA_FLEET_PSK_FILE": "fleet.psk",
        "KAKEYA_CONFIG": "../own.toml",
        "KAKEYA_WORKER_PYTHON": os.path.relpath(home.environment["KAKEYA_WORKER_PYTHON"], home.home / ".kakeya"),
        "KAKEYA_HOME": ".",
    }
    done = home.run(WORKER, "--dry-run", folder=home.home / ".kakeya", **relative)
    assert done.returncode == 0, done.stderr
    document = plistlib.loads(done.stdout.encode())
    arguments = document["ProgramArguments"]
    assert Path(arguments[0]).is_absolute()
    for flag, path in {"--model": "models/tiny", "--fleet-psk-file": ".kakeya/fleet.psk", "--config": "own.toml"}.items():
        assert arguments[arguments.index(flag) + 1] == str(home.home / path)
    assert document["WorkingDirectory"] == document["EnvironmentVariables"]["KAKEYA_HOME"] == str(home.home / ".kakeya")
    done = home.run("install_prefill_network_launchd.sh", "--dry-run", folder=home.home, KAKEYA_NETWORK_STATE="state.db")
    assert str(home.home / "state.db").replace("&", "&amp;") in done.stdout


def test_awkward_paths_reach_the_daemon_as_they_are(home: Home) -> None:
    awkward = home.home / """50% $HOME "q" 's' \\back;slash <&>"""
    model = Path(shutil.copytree(home.environment["KAKEYA_WORKER_MODEL"], awkward / "model"))
    done = home.run(WORKER, KAKEYA_WORKER_MODEL=str(model))
    assert done.returncode == 0, done.stderr
    arguments = _arguments(home, LABEL)
    assert arguments[arguments.index("--model") + 1] == str(model)


def test_without_home_it_is_told_or_not_needed(home: Home) -> None:
    done = home.run(WORKER, HOME="")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "HOME is not set" in done.stderr
    done = home.run(WORKER, HOME="", KAKEYA_HOME=str(home.home / ".kakeya"), KAKEYA_LAUNCH_AGENTS=str(home.agents))
    assert done.returncode == 0, done.stderr
    assert _arguments(home, LABEL)[1] == "worker"


def test_uninstall_also_ends_what_has_no_definition_any_more(home: Home) -> None:
    assert home.run(WORKER).returncode == 0
    (home.agents / f"{LABEL}.plist").unlink()
    done = home.run("uninstall_launchd.sh")
    assert done.returncode == 0, done.stderr
    assert f"bootout {_domain()}/{LABEL}" in home.calls
    assert not (home.home / "launchd" / f"loaded-{LABEL}").exists()
    again = home.run("uninstall_launchd.sh")
    assert (again.returncode, "nothing" in again.stderr) == (0, True)


def test_uninstall_goes_on_after_one_that_cannot_be_removed(home: Home) -> None:
    for script in SCRIPTS:
        assert home.run(script).returncode == 0
    first = home.agents / "ai.kakeya.zmq-runtime-prefill.plist"
    first.unlink()
    first.mkdir()
    done = home.run("uninstall_launchd.sh")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "error" in line and str(first) in line]
    assert list(home.agents.iterdir()) == [first]
    assert not list((home.home / "launchd").glob("loaded-*"))


def test_a_key_is_judged_as_the_daemons_judge_it(home: Home) -> None:
    psk = home.home / ".kakeya" / "fleet.psk"
    link = home.home / "link.psk"
    link.symlink_to(psk)
    for mode in (0o500, 0o700, 0o400):
        psk.chmod(mode)
        done = home.run(WORKER, "--dry-run", KAKEYA_FLEET_PSK_FILE=str(link))
        assert done.returncode == 0, done.stderr
    psk.chmod(0o640)
    done = home.run(WORKER, "--dry-run", KAKEYA_FLEET_PSK_FILE=str(link))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"the fleet key file {link} is open to other users" in line
    _, _, remedy = line.partition("(")
    assert shlex.split(remedy.rstrip(")")) == ["chmod", "600", str(link)], "it can be pasted into a shell"


def test_a_script_runs_through_a_link(home: Home) -> None:
    (home.home / "bin" / "install").symlink_to(DEPLOY / WORKER)
    (home.home / "again").symlink_to("bin/install")
    command = ["bash", str(home.home / "again"), "--dry-run"]
    done = subprocess.run(command, env=home.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert plistlib.loads(done.stdout.encode())["Label"] == LABEL


@pytest.mark.parametrize("script", [*SCRIPTS, "uninstall_launchd.sh", "install_systemd.sh"])
def test_another_shell_than_bash_is_told(home: Home, script: str) -> None:
    dash = "/bin/dash"
    if not os.access(dash, os.X_OK):
        pytest.skip("there is no dash")
    command = [dash, str(DEPLOY / script)]
    done = subprocess.run(command, env=home.environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "needs bash" in done.stderr


def test_variables_without_effect_are_told(home: Home) -> None:
    done = home.run(
        WORKER,
        "--dry-run",
        KAKEYA_WORKER_CACHEGB="6",
        KAKEYA_DRAIN_S="90",
        KAKEYA_CACHE_GB="5",
        KAKEYA_DEBUG="1",
        KAKEYA_DECODE_WORKER="1",
        KAKEYA_WORKER_RTT_MS="0.5",
        KAKEYA_NETWORK_API_KEY="not-to-be-shown",
    )
    assert done.returncode == 0, done.stderr
    warnings = [line.removeprefix("kakeya: warning: ") for line in done.stderr.splitlines() if "warning" in line]
    assert warnings == [
        "KAKEYA_CACHE_GB does not reach the service: KAKEYA_WORKER_CACHE_GB does",
        "KAKEYA_DRAIN_S does not reach the service: put drain_s into kakeya.toml, in the home folder",
        "KAKEYA_WORKER_CACHEGB is not known and has no effect: did you mean KAKEYA_WORKER_CACHE_GB?",
    ]
    assert "not-to-be-shown" not in done.stderr
    done = home.run("install_runtime_launchd.sh", "--dry-run", KAKEYA_DECODE_WORKER="1")
    assert "put decode_worker into kakeya.toml" in done.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, "uninstall_launchd.sh", "install_systemd.sh"])
def test_help_teaches_and_unknown_options_are_refused(home: Home, script: str) -> None:
    told = home.run(script, "--help")
    assert told.returncode == 0
    assert "usage: bash deploy/" in told.stdout
    assert home.run(script, "--frobnicate").returncode == 2
