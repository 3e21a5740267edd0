"""Every agent, rendered by its own install script, is started as its property list says; it is killed, and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kakeya_zmq.client import Client
from tests.deploy.launchd_standin import Agent, loaded
from tests.deploy.service_rig import Home, make_home
from tests.fleet_rig import wait_until
from tests.proxy import free_port
from wire.errors import KakeyaError

START_S = 90.0
NETWORK = "install_prefill_network_launchd.sh"


@pytest.fixture
def home(tmp_path: Path, model: Path) -> Home:
    made = make_home(tmp_path)
    folder = Path(made.environment["KAKEYA_WORKER_MODEL"])
    shutil.rmtree(folder)
    shutil.copytree(model, folder)
    return made


def _serves(home: Home, address: str) -> Callable[[], bool]:
    def serves() -> bool:
        psk_file = home.home / ".kakeya" / "fleet.psk"
        with contextlib.suppress(KakeyaError), Client(address, psk_file=psk_file, connect_timeout_s=1) as client:
            return client.status().sections["node"]["state"] == "serving"
        return False

    return serves


def _answers(url: str, host: str = "") -> Callable[[], bool]:
    """``host``: what a browser elsewhere calls it."""
    request = urllib.request.Request(url, headers={"Host": host} if host else {})

    def answers() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:
                return bool(answer.status == 200 and json.load(answer))
        except (OSError, ValueError):
            return False

    return answers


def _installed(home: Home, label: str, script: str, *arguments: str, **variables: str) -> Agent:
    done = home.run(script, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return Agent(home.agents / f"{label}.plist", home.home)


def _make(home: Home, label: str) -> tuple[Agent, Callable[[], bool]]:
    """The installed agent, and what tells that it is healthy."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    match label:
        case "ai.kakeya.prefill-worker":
            variables = {"KAKEYA_WORKER_BIND": address, "KAKEYA_WORKER_ADVERTISE": address}
            return _installed(home, label, "install_prefill_worker_launchd.sh", **variables), _serves(home, address)
        case "ai.kakeya.zmq-runtime-prefill":
            health = free_port()
            variables = {"KAKEYA_RUNTIME_BIND": address, "KAKEYA_RUNTIME_HEALTH_PORT": str(health)}
            agent = _installed(home, label, "install_runtime_launchd.sh", **variables)
            serves, answers = _serves(home, address), _answers(f"http://127.0.0.1:{health}/healthz")
            return agent, lambda: serves() and answers()
        case "ai.kakeya.prefill-network-peer":
            variables = {"KAKEYA_CACHE_BIND": address, "KAKEYA_CACHE_ADVERTISE": address}
            return _installed(home, label, NETWORK, "--cache-peer", **variables), _serves(home, address)
        case _:
            names = {"KAKEYA_NETWORK_HTTP_PORT": str(port), "KAKEYA_NETWORK_ALLOW_HOST": "fleet.example, kakeya.example"}
            agent = _installed(home, label, NETWORK, **names)
            return agent, _answers(f"http://{address}/healthz", host="kakeya.example")


def _kept(agent: Agent, healthy: Callable[[], bool]) -> Callable[[], bool]:
    """Whether it is healthy, after the supervisor's turn; it fails when the agent does not stay up."""

    def well() -> bool:
        assert agent.keep(), f"it ended and is not restarted:\n{agent.log.read_text(encoding='utf-8')[-2000:]}"
        assert agent.starts < 4, f"it does not stay up:\n{agent.log.read_text(encoding='utf-8')[-2000:]}"
        return healthy()

    return well


@pytest.mark.parametrize(
    "label",
    [
        "ai.kakeya.zmq-runtime-prefill",
        pytest.param("ai.kakeya.prefill-worker", marks=pytest.mark.slow),
        pytest.param("ai.kakeya.prefill-network-peer", marks=pytest.mark.slow),
        "ai.kakeya.prefill-network",
    ],
)
def test_an_agent_runs_as_its_property_list_says_and_is_kept_alive(home: Home, label: str) -> None:
    agent, healthy = _make(home, label)

    well = _kept(agent, healthy)
    with loaded(agent):
        wait_until(well, f"{label} is healthy", START_S)
        assert agent.starts == 1
        assert agent.process is not None
        first = agent.process.pid
        os.kill(first, signal.SIGKILL)
        agent.process.wait()
        wait_until(well, f"{label} is healthy again", START_S)
        assert (agent.starts, agent.process.pid != first) == (2, True)
        assert agent.unload() == 0
        assert not agent.keep(), "what was told to stop stays stopped"
    text = agent.log.read_text(encoding="utf-8")
    assert "serves on" in text
    secret = (home.home / ".kakeya" / "fleet.psk").read_text(encoding="utf-8").strip()
    assert secret not in text
    assert secret not in " ".join(agent.document["ProgramArguments"])


def test_without_the_switch_the_runtime_runs_with_the_cache_off(home: Home) -> None:
    """The rollback of the runbook."""
    address = f"127.0.0.1:{free_port()}"
    agent = _installed(
        home,
        "ai.kakeya.zmq-runtime-prefill",
        "install_runtime_launchd.sh",
        KAKEYA_ENABLE_PREFILL_CACHE="0",
        KAKEYA_RUNTIME_BIND=address,
        KAKEYA_RUNTIME_HEALTH_PORT="0",
    )
    assert "--enable-prefill-cache=0" in agent.document["ProgramArguments"]
    assert "--enable-prefill-cache" not in agent.document["ProgramArguments"]
    with loaded(agent):
        wait_until(_kept(agent, _serves(home, address)), "it serves", START_S)
        with Client(address, psk_file=home.home / ".kakeya" / "fleet.psk") as client:
            for _ in range(2):
                with client.create_session() as session:
                    session.append(list(range(2, 200)))
                    assert len(list(session.generate(5))) == 5
            sections = client.status().sections
        assert sections["primary"]["policy"] == "cache off"
        assert sections["cache"]["entry_count"] == 0
        assert (sections["prefill"]["local_hits"], sections["prefill"]["tokens_reused"]) == (0, 0)
        assert agent.unload() == 0
