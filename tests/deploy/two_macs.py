"""The runbook's two Macs as two network namespaces: a head with runtime and dashboard, and a machine with a prefill worker.

Every daemon is installed by its own script and started by the stand-in for launchd exactly as its property list says, with
the ports of the runbook. What is not the runbook's: addresses, the tiny model, and a ``kakeya.toml`` in each home, which
has shorter times than a real fleet, and one thread for each model, since both machines share this one's processor.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kakeya_zmq.client import Client
from tests.deploy.launchd_standin import Agent
from tests.deploy.service_rig import PROJECT, Home, make_home
from tests.fleet_rig import START_TIMEOUT_S, figure, wait_until
from tests.namespaces import Namespace, Star
from wire.errors import KakeyaError
from wire.messages import Status

RUNTIME: Final = "ai.kakeya.zmq-runtime-prefill"
DASHBOARD: Final = "ai.kakeya.prefill-network"
WORKER: Final = "ai.kakeya.prefill-worker"
SCRIPTS: Final = {
    RUNTIME: "install_runtime_launchd.sh",
    DASHBOARD: "install_prefill_network_launchd.sh",
    WORKER: "install_prefill_worker_launchd.sh",
}
HEAD_ID: Final = "head-runtime"
WORKER_ID: Final = "prefill-mini-1"
HEAD_PORT: Final = 51051
WORKER_PORT: Final = 53051
DASHBOARD_PORT: Final = 8090
HEALTH_PORT: Final = 8091
BULK_PORTS: Final = "54000-54099"
TENANT: Final = "private-fleet"
GOSSIP_INTERVAL_S: Final = 3.0
TTL_S: Final = 8.0
STOP_S: Final = 45.0
_TIMES: Final = f"gossip_interval_s = {GOSSIP_INTERVAL_S}\nttl_seconds = {TTL_S}\ntelemetry_interval_s = 0.5\n"
_SHARED_CORES: Final = "blas_threads = 1\n"


class MacAgent(Agent):
    """An agent in a network namespace; its process ends when the fixture that made it does, not with a test."""

    def __init__(self, plist: Path, home: Path, namespace: Namespace, kept: set[int]) -> None:
        super().__init__(plist, home)
        self.arguments: list[str] = self.document["ProgramArguments"]
        """As the property list has them."""
        self._namespace = namespace
        self._kept = kept

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def play(self, module: str, *first: str) -> Self:
        """Run another program with the same settings: ``python -m MODULE FIRST… ROLE FLAGS…`` in place of ``kakeya``."""
        python = str(Path(self.arguments[0]).with_name("python"))
        self.arguments = [python, "-m", module, *first, *self.arguments[1:]]
        self.document["EnvironmentVariables"]["PYTHONPATH"] = str(PROJECT)
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_S)

    def _start(self) -> None:
        self.document["ProgramArguments"] = [*self._namespace.wrapper, *self.arguments]
        super()._start()
        self._kept.add(self.pid)


class Mac:
    """One machine: a network stack, and a home with keys, model and agents."""

    def __init__(self, namespace: Namespace, address: str, port: int, home: Home, kept: set[int]) -> None:
        self.namespace = namespace
        self.address = address
        self.port = port
        self.home = home
        self.kakeya = home.home / ".kakeya"
        self.agents: dict[str, MacAgent] = {}
        self.changed = False
        """It runs with other settings than the profile's."""
        self._kept = kept

    def configure(self, extra: str = "") -> None:
        """Write ``kakeya.toml``; who reads it starts later."""
        (self.kakeya / "kakeya.toml").write_text(_TIMES + _SHARED_CORES + extra, encoding="utf-8")

    def install(self, label: str, **variables: str) -> MacAgent:
        """Run the install script of a service; what it installed is not started yet."""
        done = self.home.run(SCRIPTS[label], **variables)
        assert done.returncode == 0, done.stderr
        return MacAgent(self.home.agents / f"{label}.plist", self.home.home, self.namespace, self._kept)

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """A client of the node of this machine, on this machine."""
        address = f"{self.address}:{self.port}"
        with self.namespace.call(lambda: Client(address, psk_file=self.kakeya / "fleet.psk")) as client:
            yield client

    def status(self) -> Status | None:
        """None while it does not answer."""
        with contextlib.suppress(KakeyaError), self.client() as client:
            return client.status()
        return None

    @property
    def serving(self) -> bool:
        status = self.status()
        return status is not None and status.sections["node"]["state"] == "serving"

    def wait_serving(self, label: str) -> None:
        agent = self.agents[label]

        def serves() -> bool:
            assert agent.running, f"{label} ended while starting:\n{last_lines(agent)}"
            return self.serving

        wait_until(serves, f"{label} serves", START_TIMEOUT_S)

    def run(self, *arguments: str) -> str:
        """Standard output of a ``kakeya`` command on this machine."""
        command = [*self.namespace.wrapper, str(Path(self.home.environment["KAKEYA_RUNTIME_PYTHON"]).with_name("kakeya"))]
        done = subprocess.run(
            [*command, *arguments],
            env={**self.home.environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            cwd=self.home.home,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop_all(self) -> None:
        for agent in self.agents.values():
            if agent.running:
                assert agent.process is not None
                agent.process.send_signal(signal.SIGCONT)
                agent.unload()


class TwoMacs:
    """Both machines and the cable between them; leaving the block ends every process."""

    def __init__(self, star: Star, model: Path, folder: Path, kept: set[int]) -> None:
        self.star = star
        head, worker = make_home(folder / "head"), make_home(folder / "worker")
        for home in (head, worker):
            target = Path(home.environment["KAKEYA_WORKER_MODEL"])
            shutil.rmtree(target)
            shutil.copytree(model, target)
        self._usual: dict[str, MacAgent] = {}
        """As the profile has them."""
        self.head = Mac(star.middle, star.middle_address("worker"), HEAD_PORT, head, kept)
        self.worker = Mac(star.leaves["worker"], star.address("worker"), WORKER_PORT, worker, kept)
        copy_secret(self.head.kakeya / "fleet.psk", self.worker.kakeya / "fleet.psk")
        for mac in (self.head, self.worker):
            mac.configure()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.show_logs()
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _start(self) -> None:
        """As the runbook does it: the runtime, whose tenant key is copied; the worker; the dashboard."""
        self._launch(self.head, RUNTIME, self.install_runtime())
        self.head.wait_serving(RUNTIME)
        secret = Path("tenants") / f"{TENANT}.key"
        copy_secret(self.head.kakeya / secret, self.worker.kakeya / secret)
        self._launch(self.worker, WORKER, self.install_worker())
        self._launch(self.head, DASHBOARD, self.head.install(DASHBOARD))
        self.worker.wait_serving(WORKER)
        self.wait_known()

    def _launch(self, mac: Mac, label: str, agent: MacAgent) -> None:
        mac.agents[label] = self._usual[label] = agent
        agent.load()

    def heal(self) -> None:
        """Plug the cable in, undo changes, start what does not run; when this returns, both machines know each other."""
        self.star.mend("worker")
        for mac, label in ((self.head, RUNTIME), (self.worker, WORKER)):
            agent, usual = mac.agents[label], self._usual[label]
            if agent.running and (mac.changed or agent is not usual):
                agent.unload()
            if not agent.running:
                mac.configure()
                mac.changed = False
                mac.agents[label] = usual
                usual.load()
                mac.wait_serving(label)
        self.wait_known()

    def change_head(self, settings: str) -> None:
        """Let the runtime run with further settings, until :meth:`heal`."""
        self.head.changed = True
        self.head.agents[RUNTIME].unload()
        self.head.configure(settings)
        self.head.agents[RUNTIME].load()
        self.head.wait_serving(RUNTIME)
        self.wait_known()

    def change_worker(self, agent: MacAgent) -> None:
        """Let another worker run, until :meth:`heal`."""
        self.worker.agents[WORKER].unload()
        self.worker.agents[WORKER] = agent
        agent.load()
        self.worker.wait_serving(WORKER)
        self.wait_known()

    def _stop(self) -> None:
        self.star.mend("worker")
        self.worker.stop_all()
        self.head.stop_all()

    def install_runtime(self) -> MacAgent:
        return self.head.install(
            RUNTIME,
            KAKEYA_RUNTIME_ADVERTISE=f"{self.head.address}:{HEAD_PORT}",
            KAKEYA_RUNTIME_PEER=f"{self.worker.address}:{WORKER_PORT}",
            KAKEYA_TENANT_ID=TENANT,
            KAKEYA_PREFILL_POLICY="remote-required",
            KAKEYA_RUNTIME_NETWORK="thunderbolt",
            KAKEYA_PREFILL_WORKER_TIMEOUT_S="3600",
        )

    def install_worker(self, **changes: str) -> MacAgent:
        address = f"{self.worker.address}:{WORKER_PORT}"
        variables = {
            "KAKEYA_WORKER_NODE_ID": WORKER_ID,
            "KAKEYA_WORKER_BIND": address,
            "KAKEYA_WORKER_ADVERTISE": address,
            "KAKEYA_WORKER_PEER": f"{self.head.address}:{HEAD_PORT}",
            "KAKEYA_WORKER_NETWORK": "thunderbolt",
            "KAKEYA_WORKER_PRIORITY": "100",
            "KAKEYA_WORKER_CACHE_GB": "8",
            "KAKEYA_WORKER_CACHE_MIN_GB": "0.25",
            "KAKEYA_WORKER_MEMORY_RESERVE_GB": "2",
            "KAKEYA_WORKER_ADAPTIVE_CACHE": "1",
            "KAKEYA_BULK_PORTS": BULK_PORTS,
            "KAKEYA_TENANT_ID": TENANT,
        }
        return self.worker.install(WORKER, **{**variables, **changes})

    # --- what the machines say ---------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """An answer of the dashboard's API, asked for on the head."""
        with contextlib.suppress(OSError):
            return self.head.namespace.call(lambda: _get(f"http://127.0.0.1:{DASHBOARD_PORT}{path}"))
        return None

    def shown(self) -> dict[str, dict[str, Any]]:
        """The dashboard's nodes by alias."""
        return {row["alias"]: row for row in self.get("/v1/network/nodes") or ()}

    def card_of(self, node_id: str, mac: Mac) -> dict[str, Any]:
        """What the node of a machine knows of another one by its card; empty when it has none."""
        status = mac.status()
        rows = [] if status is None else [row for row in status.peers if row["node_id"] == node_id and row.get("roles")]
        return dict(rows[0]) if rows else {}

    def wait_known(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Each machine is connected to the other or holds its card, and the dashboard shows both."""

        def known() -> bool:
            connected = self.card_of(WORKER_ID, self.head).get("state") == "up"
            return connected and bool(self.card_of(HEAD_ID, self.worker)) and {HEAD_ID, WORKER_ID} <= self.online()

        wait_until(known, "both machines know each other, and the dashboard shows both", timeout_s)

    def wait_contents_told(self) -> None:
        """Wait until the head knows by card of all that the worker holds now: gossip tells of it, once an interval."""
        with self.worker.client() as client:
            held = figure(client, "cache", "entry_count")
        wait_until(lambda: self.card_of(WORKER_ID, self.head).get("cache_entries") == held, "the card tells what is held")

    def wait_shown_now(self) -> None:
        """Wait until the dashboard has heard from the head since this call."""
        with self.head.client() as client:
            uptime_s = float(client.status().sections["node"]["uptime_s"] or 0)
        wait_until(lambda: self.shown()[HEAD_ID]["uptime_s"] > uptime_s, "the dashboard has heard from the head")

    def online(self) -> set[str]:
        return {alias for alias, row in self.shown().items() if row["status"] == "online"}

    def show_logs(self) -> None:
        for mac in (self.head, self.worker):
            for label, agent in mac.agents.items():
                print(f"--- {label} ---\n{last_lines(agent)}")


def last_lines(agent: Agent, count: int = 25) -> str:
    text = agent.log.read_text(encoding="utf-8", errors="replace") if agent.log.exists() else ""
    return "\n".join(text.splitlines()[-count:])


def copy_secret(source: Path, target: Path) -> None:
    """What ``scp -p`` does."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copy2(source, target)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)
