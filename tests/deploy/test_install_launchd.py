"""The launchd install scripts, run for real against a stand-in for launchctl."""

from __future__ import annotations

import os
import plistlib
from pathlib import Path

import pytest

from tests.deploy.service_rig import Home, make_home

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
    assert "three times" in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
    assert home.calls == []
    assert not home.agents.exists()


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


@pytest.mark.parametrize("script", [*SCRIPTS, "uninstall_launchd.sh", "install_systemd.sh"])
def test_help_teaches_and_unknown_options_are_refused(home: Home, script: str) -> None:
    told = home.run(script, "--help")
    assert told.returncode == 0
    assert "usage: bash deploy/" in told.stdout
    assert home.run(script, "--frobnicate").returncode == 2
