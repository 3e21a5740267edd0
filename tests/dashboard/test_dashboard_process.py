"""The dashboard as a process behind a real fleet: the runbook's lines, jobs, a killed node, restarts, pairing, keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kakeya_zmq.io.addresses import Address, parse_address
from tests.dashboard.web_kit import Answer, EventStream, call
from tests.fleet_rig import PROJECT, Fleet, ask, clean_environment, kept_fleet, prompt, wait_until
from wire.keys import FleetKey, write_secret_file

KEY = "0123456789abcdef" * 3
TTL_S = 3.0


@dataclass
class Process:
    """A running ``kakeya dashboard``."""

    process: subprocess.Popen[bytes]
    ready: Path
    log: Path
    address: Address = field(init=False)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text("utf-8")
            return self.ready.exists()

        wait_until(ready, "the dashboard is ready", 60)
        self.address = parse_address(json.loads(self.ready.read_text("utf-8"))["address"])

    def get(self, path: str, key: str | None = None) -> Any:
        answer = self.call("GET", path, key=key)
        assert answer.status == 200, answer.body
        return answer.json

    def call(self, method: str, path: str, body: object = None, *, key: str | None = None) -> Answer:
        return call(self.address, method, path, body, key=key)

    def node_states(self) -> dict[str, str]:
        return {node["id"]: node["status"] for node in self.get("/v1/network/nodes")}


@contextlib.contextmanager
def dashboard(environment: dict[str, str], folder: Path, *flags: str, bind: str = "127.0.0.1:0") -> Iterator[Process]:
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "dashboard.started", folder / "dashboard.log"
    ready.unlink(missing_ok=True)
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "daemons", "dashboard", "--bind", bind, "--ready-file", str(ready), *flags],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            cwd=PROJECT,
            env=environment,
        )
    try:
        made = Process(process, ready, log)
        made.wait_ready()
        yield made
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            finally:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # A home of its own in a home folder of its own, so that the runbook's "~/.kakeya" is this fleet's.
    home = tmp_path_factory.mktemp("user") / ".kakeya"
    home.mkdir(mode=0o700)
    with kept_fleet(request, model, home) as made:
        made.environment = {**made.environment, "HOME": str(home.parent)}
        flags = ("--telemetry-interval-s", "0.3", "--ttl-seconds", str(TTL_S))
        made.start("primary", "worker", "cache", primary=flags, worker=flags, cache=flags)
        write_secret_file(home / "network_api_key", KEY.encode())
        yield made


def all_online(web: Process) -> bool:
    return web.node_states() == {"primary": "online", "worker": "online", "cache": "online"}


def work(fleet: Fleet, seed: int, length: int = 900) -> None:
    with fleet["primary"].client() as client, client.create_session() as session:
        ask(session, prompt(length, seed), 8)


def test_the_fleet_is_found_and_what_it_does_is_told(fleet: Fleet, tmp_path: Path) -> None:
    with dashboard(fleet.environment, tmp_path) as web:
        wait_until(lambda: all_online(web), "all nodes are online")
        before = web.get("/v1/network/summary")
        with EventStream(web.address, "/v1/network/events?topics=jobs") as events:
            work(fleet, 11)
            seen = events.next("jobs")
            while not any(job["place"] == "worker" and job["state"] == "completed" for job in seen["ended"]):
                seen = events.next("jobs")
        (job,) = [job for job in seen["ended"] if job["node_id"] == "worker" and job["tokens_total"] == 899]
        assert (job["tokens_done"], job["progress"], job["asker"]) == (899, 1.0, "primary")

        def increased() -> bool:
            now = web.get("/v1/network/summary")
            return all(now[name] > before[name] for name in ("completed_tokens", "kv_assisted_tokens", "cache_bytes_used"))

        wait_until(increased, "the counters grow")
        prefill = web.get("/v1/network/prefill")
        assert prefill["remote_jobs"] >= 1
        assert prefill["tokens_reused"] >= 899
        wait_until(lambda: bool(web.get("/v1/network/requests")["items"]), "the request is told")
        (request,) = [r for r in web.get("/v1/network/requests")["items"] if r["operation"] == "append"]
        assert (request["source"], request["outcome"], request["boundary"]) == ("worker", "ready", 899)
        assert {source["node_id"] for source in request["sources"]} == {"worker"}
        wait_until(
            lambda: {t["purpose"] for t in web.get("/v1/network/transfers")["items"]} >= {"job", "publish"}, "the transfers"
        )
        kvfs = web.get("/v1/network/kvfs")
        assert {mount["node_id"]: mount["tier"] for mount in kvfs["mounts"]} == {
            "primary": "hot",
            "worker": "cold-offload",
            "cache": "cold-offload",
        }
        assert re.fullmatch(r"kv://default/[^/]+/[0-9a-f]{64}", kvfs["uri"])
        texts = [web.call("GET", f"/v1/network/{name}").text for name in ("nodes", "topology", "kvfs", "requests", "jobs")]
        assert not any("127.0.0.1" in text for text in texts)
        assert web.get("/v1/network/nodes", key=KEY)[0]["endpoint"]["address"] == fleet["primary"].address
        assert 'kakeya_node_up{node="primary",role="primary"} 1.0' in web.call("GET", "/metrics").text


def test_every_read_fits_its_schema_over_the_real_fleet(fleet: Fleet, tmp_path: Path) -> None:
    with dashboard(fleet.environment, tmp_path) as web:
        wait_until(lambda: all_online(web), "all nodes are online")
        work(fleet, 13)
        wait_until(lambda: bool(web.get("/v1/network/transfers")["items"]), "something happened")
        run = web.call("POST", "/v1/network/benchmarks", {}, key=KEY).json["id"]
        document = web.get("/openapi.json")
        checked = 0
        for path, methods in document["paths"].items():
            content = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema")
            if schema is None or "capture" in path:
                continue
            for key in (None, KEY):
                answer = web.call("GET", path.replace("{run_id}", run), key=key)
                if key is None and path.endswith("/logs"):
                    assert answer.status == 401
                    continue
                assert answer.status == 200
                jsonschema.validate(answer.json, {**schema, "components": document["components"]})
                checked += 1
        assert checked > 35


def test_a_killed_node_turns_stale_and_disappears_and_returns(fleet: Fleet, tmp_path: Path) -> None:
    with dashboard(fleet.environment, tmp_path) as web:
        wait_until(lambda: all_online(web), "all nodes are online")
        fleet["cache"].kill()
        wait_until(lambda: web.node_states().get("cache") == "stale", "the killed node is stale")
        wait_until(lambda: "cache" not in web.node_states(), "the killed node is gone")
        fleet.heal()
        wait_until(lambda: all_online(web), "the node is back")
        assert {node["id"]: node["restarts"] for node in web.get("/v1/network/nodes")}["primary"] == 0


def test_it_can_be_killed_and_started_again_at_any_time(fleet: Fleet, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "network.sqlite3"))
    with dashboard(fleet.environment, tmp_path, *state) as web:
        wait_until(lambda: all_online(web), "all nodes are online")
        work(fleet, 12)
        wait_until(lambda: web.get("/v1/network/tokens")["completed"] > 0, "tokens are counted")
        made = web.call("POST", "/v1/network/nodes/register", {"alias": "new", "address": "host:1"}, key=KEY).json
        run = web.call("POST", "/v1/network/benchmarks", {}, key=KEY).json
        before = web.get("/v1/network/tokens")
        web.process.send_signal(signal.SIGKILL)
        web.process.wait(20)
    with dashboard(fleet.environment, tmp_path, *state) as web:
        wait_until(lambda: web.node_states().get("primary") == "online", "the fleet is seen again")
        assert web.node_states()[made["id"]] == "pending"
        assert web.get("/v1/network/benchmarks/live")["id"] == run["id"]
        wait_until(lambda: web.get("/v1/network/tokens")["completed"] >= before["completed"], "the sums are back")
        web.process.terminate()
        assert web.process.wait(20) == 0


def test_with_the_telemetry_key_and_one_address_it_sees_the_whole_fleet(fleet: Fleet, tmp_path: Path) -> None:
    home = tmp_path / "elsewhere"
    key = FleetKey.load(fleet.psk_file).telemetry_key()
    write_secret_file(home / "telemetry.key", key.to_text())
    facts = json.loads((fleet.home / "run" / "cache.ready").read_text("utf-8"))
    bus = f"127.0.0.1:{facts['bus_port']}"
    environment = {**clean_environment(), "KAKEYA_HOME": str(home)}
    with dashboard(environment, tmp_path, "--bus", bus) as web:
        wait_until(lambda: all_online(web), "all nodes are online")
        assert web.call("POST", "/v1/network/groups", {"name": "g", "node_ids": ["x"]}, key="any").status == 403
        assert web.call("GET", "/v1/network/maintenance/capture").status == 403
        assert "writes are closed" in web.log.read_text("utf-8")
    assert not (home / "fleet.psk").exists()


RUNBOOK = """
KEY="$(cat ~/.kakeya/network_api_key)"
curl -fsS http://127.0.0.1:8090/healthz
curl -fsS http://127.0.0.1:8090/v1/network/nodes
curl -fsS -X POST http://127.0.0.1:8090/v1/network/nodes/register \\
  -H "Content-Type: application/json" \\
  -H "X-API-Key: $KEY" \\
  -d '{"alias":"allens-mini","address":"169.254.27.104:52051","region":"Private","role":"cache"}'
curl -fsS -X POST http://127.0.0.1:8090/v1/network/groups \\
  -H "Content-Type: application/json" \\
  -H "X-API-Key: $KEY" \\
  -d '{"name":"Thunderbolt Pair","node_ids":["head-mini","allens-mini"]}'
curl -fsS https://kakeya.ai/healthz
curl -fsS https://kakeya.ai/v1/network/summary
curl -fsS https://kakeya.ai/v1/network/tokens
curl -fsS https://kakeya.ai/v1/network/prefill
curl -fsS http://127.0.0.1:8090/v1/network/kvfs
curl -fsS https://kakeya.ai/v1/network/benchmarks
curl -fsS https://kakeya.ai/v1/network/benchmarks/live
curl -fsS https://kakeya.ai/v1/network/benchmarks/<run-id>
"""
"""As the operators' runbook has them; its public name stands for this dashboard."""


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_of_the_runbook_work_as_written(fleet: Fleet, tmp_path: Path) -> None:
    bind = "127.0.0.1:8090" if port_is_free(8090) else "127.0.0.1:0"
    with dashboard(fleet.environment, tmp_path, bind=bind) as web:
        wait_until(lambda: all_online(web), "all nodes are online")
        run = web.call("POST", "/v1/network/benchmarks", {}, key=KEY).json["id"]
        script = RUNBOOK.replace("https://kakeya.ai", "http://127.0.0.1:8090").replace("<run-id>", run)
        script = script.replace("127.0.0.1:8090", str(web.address)).replace("curl -fsS", "echo; curl -fsS")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            env={"HOME": fleet.environment["HOME"], "PATH": os.environ["PATH"]},
        )
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines() if line]
        assert len(answers) == RUNBOOK.count("curl")
        assert answers[0]["status"] == "ok"
        assert (answers[2]["status"], answers[2]["role"]) == ("pending", "cache")
        assert answers[-1]["id"] == run
        assert [group["name"] for group in web.get("/v1/network/groups")] == ["Thunderbolt Pair"]


def test_a_node_pairs_by_the_command_and_the_token_is_never_an_argument(fleet: Fleet, tmp_path: Path) -> None:
    with dashboard(fleet.environment, tmp_path, "--state", str(tmp_path / "state.sqlite3")) as web:
        body = {"alias": "Attic Mini", "address": "host:1", "region": "Attic", "role": "cache"}
        token = web.call("POST", "/v1/network/nodes/register", body, key=KEY).json["pairing_token"]
        url = f"http://{web.address}"

        def pair(node_id: str, given: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "daemons", "pair", "--dashboard", url, "--node-id", node_id, "--json"],
                input=f"{given}\n",
                capture_output=True,
                text=True,
                timeout=60,
                cwd=PROJECT,
                env=fleet.environment,
            )

        assert pair("nobody", token).returncode == 2
        assert pair("cache", "kn_pair_wrong").returncode == 2
        done = pair("cache", token)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["alias"] == "Attic Mini"
        wait_until(lambda: web.node_states().get("cache") == "online", "the node is online")
        (node,) = [node for node in web.get("/v1/network/nodes") if node["id"] == "cache"]
        assert (node["alias"], node["region"], node["role"], node["paired"]) == ("Attic Mini", "Attic", "cache", True)
        assert pair("worker", token).returncode == 2


# --- what stops it from starting -------------------------------------------------------------------------------------


def start(home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "daemons", "dashboard", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=PROJECT,
        env={**clean_environment(), "KAKEYA_HOME": str(home)},
    )


def test_it_refuses_to_start_in_one_line_and_says_what_to_do(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)
    assert "kakeya key telemetry" in done.stderr
    write_secret_file(tmp_path / "telemetry.key", FleetKey(b"k" * 32).telemetry_key().to_text())
    (tmp_path / "network_api_key").write_text("open to others")
    (tmp_path / "network_api_key").chmod(0o644)
    done = start(tmp_path)
    assert (done.returncode, "chmod 600" in done.stderr) == (4, True)
    (tmp_path / "network_api_key").unlink()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = start(tmp_path, "--bind", f"127.0.0.1:{taken.getsockname()[1]}")
        assert (done.returncode, "--bind" in done.stderr) == (5, True)
    (tmp_path / "bad.sqlite3").write_bytes(b"no database" * 100)
    done = start(tmp_path, "--bind", "127.0.0.1:0", "--state", str(tmp_path / "bad.sqlite3"))
    assert (done.returncode, "move it away" in done.stderr) == (2, True)
    assert start(tmp_path, "--bus", "nonsense").returncode == 2


def test_binding_to_other_machines_is_said_clearly(tmp_path: Path) -> None:
    write_secret_file(tmp_path / "telemetry.key", FleetKey(b"k" * 32).telemetry_key().to_text())
    environment = {**clean_environment(), "KAKEYA_HOME": str(tmp_path), "KAKEYA_NETWORK_API_KEY": KEY}
    with dashboard(environment, tmp_path, bind="0.0.0.0:0") as web:
        assert "can be reached from other machines" in web.log.read_text("utf-8")
        assert KEY not in web.log.read_text("utf-8")
        local = Address("127.0.0.1", web.address.port)
        answer = call(local, "POST", "/v1/network/groups", {"name": "g", "node_ids": ["a"]}, key=KEY)
        assert answer.status == 200


def test_a_telemetry_key_of_an_older_fleet_key_is_replaced(tmp_path: Path) -> None:
    from daemons.dashboard_command import load_telemetry_key, write_telemetry_key

    psk, file = tmp_path / "fleet.psk", tmp_path / "telemetry.key"
    write_secret_file(psk, b"a" * 32)
    assert write_telemetry_key(file, psk) is True
    assert write_telemetry_key(file, psk) is False
    psk.unlink()
    assert load_telemetry_key(file, psk).secret == FleetKey(b"a" * 32).telemetry_key().secret
    write_secret_file(psk, b"b" * 32)
    assert load_telemetry_key(file, psk).secret == FleetKey(b"b" * 32).telemetry_key().secret
    assert file.stat().st_mode & 0o777 == 0o600
