"""A daemon that is told to stop finishes what runs; a second signal ends it; a taken port is refused by its owner's name."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya_zmq.client import Client
from tests.deploy.hanging_primary import SLOW_LOAD_S, TOKENS_BEFORE_HANG
from tests.deploy.slow_ending import ENDING
from tests.fleet_rig import BLOCK_TOKENS, Fleet, figure, prompt, run_kakeya, wait_until, worker_only
from wire.errors import FailureCode, RequestFailed

LONG_ANSWER = 400
"""Tokens: some seconds of decoding, so that the signal comes in the middle."""
LONG_PROMPT = 6_000
"""Tokens: some seconds of a worker's time."""
DRAINING = ("--drain-s", "60")
SMALL_STEPS = ("--prefill-compute-chunk-tokens", "64")


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(model, tmp_path / "home") as made:
        yield made


def _refused(client: Client) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        client.create_session()
    return caught.value


def test_a_primary_finishes_its_answer_publishes_it_and_takes_nothing_new(fleet: Fleet) -> None:
    fleet.start("primary", "cache", primary=DRAINING)
    with fleet["primary"].client() as client, fleet["cache"].client() as cache:
        session = client.create_session()
        session.append(prompt(3 * BLOCK_TOKENS + 1, seed=1))
        tokens = []
        answer = session.generate(LONG_ANSWER)
        tokens.append(next(answer))
        fleet["primary"].signal(signal.SIGTERM)
        wait_until(lambda: client.status().sections["node"]["state"] == "draining", "it drains")
        refusal = _refused(client)
        assert (refusal.code, "draining" in str(refusal)) == (FailureCode.UNAVAILABLE, True)
        assert fleet["primary"].running
        tokens += answer
        assert len(tokens) == LONG_ANSWER
        assert fleet["primary"].process is not None
        assert fleet["primary"].process.wait(30) == 0
        assert figure(cache, "cache", "block_count") >= (3 * BLOCK_TOKENS + LONG_ANSWER) // BLOCK_TOKENS


def test_a_worker_finishes_its_job_and_is_not_given_another(fleet: Fleet) -> None:
    fleet.start("primary", "worker", worker=(*DRAINING, *SMALL_STEPS))
    failures: list[BaseException] = []
    reused: list[int] = []
    tokens = prompt(LONG_PROMPT, seed=2)

    def run() -> None:
        try:
            with fleet["primary"].client() as client, worker_only(client) as session:
                explanation = session.append(tokens).explanation
                reused.append(sum(source.end - source.start for source in explanation.sources if source.node_id))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    with fleet["worker"].client() as worker:
        thread.start()
        wait_until(lambda: worker.status().sections["worker"]["running_jobs"] == 1, "the job runs")
        fleet["worker"].signal(signal.SIGTERM)
        thread.join(60)
    assert failures == []
    assert reused == [len(tokens) - 1]
    assert fleet["worker"].process is not None
    assert fleet["worker"].process.wait(30) == 0
    with fleet["primary"].client() as client:
        assert figure(client, "prefill", "remote_job_failures") == 0


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_handed_back(fleet: Fleet) -> None:
    fleet.start("primary", "worker", worker=("--drain-s", "0", *SMALL_STEPS))
    done: list[int] = []
    tokens = prompt(LONG_PROMPT, seed=3)

    def run() -> None:
        with fleet["primary"].client() as client, client.create_session() as session:
            done.append(session.append(tokens).history_tokens)

    thread = threading.Thread(target=run)
    with fleet["worker"].client() as worker:
        thread.start()
        wait_until(lambda: worker.status().sections["worker"]["running_jobs"] == 1, "the job runs")
        assert fleet["worker"].terminate() == 0
    thread.join(120)
    assert done == [len(tokens)]


def test_a_second_signal_ends_at_once(fleet: Fleet) -> None:
    fleet.start("primary", primary=("--drain-s", "600"))
    with fleet["primary"].client() as client:
        session = client.create_session()
        session.append(prompt(10, seed=4))
        answer = session.generate(20_000)
        next(answer)
        fleet["primary"].signal(signal.SIGTERM)
        wait_until(lambda: client.status().sections["node"]["state"] == "draining", "it drains")
        fleet["primary"].signal(signal.SIGTERM)
        assert fleet["primary"].process is not None
        assert fleet["primary"].process.wait(15) == 128 + signal.SIGTERM
        answer.close()


def test_a_second_signal_ends_a_daemon_that_is_ending_already(fleet: Fleet) -> None:
    cache = fleet.add("cache", program=("tests.deploy.slow_ending",))
    cache.launch()
    cache.wait_ready()
    cache.signal(signal.SIGTERM)
    wait_until(lambda: ENDING in cache.last_lines(), "it ends")
    cache.signal(signal.SIGTERM)
    assert cache.process is not None
    assert cache.process.wait(15) == 128 + signal.SIGTERM


def test_status_finds_what_runs_here_however_it_was_started(fleet: Fleet) -> None:
    nothing = run_kakeya("status", home=fleet.home)
    assert (nothing.returncode, "no node is running here" in nothing.stdout) == (3, True)
    fleet.start("cache")
    found = run_kakeya("status", home=fleet.home)
    assert found.returncode == 0, found.stderr
    assert f"{fleet['cache'].name} (cache) at {fleet['cache'].address}" in found.stdout
    fleet["cache"].process.kill()  # type: ignore[union-attr]
    fleet["cache"].process.wait(15)  # type: ignore[union-attr]
    assert run_kakeya("status", home=fleet.home).returncode == 3


def test_a_taken_port_is_refused_by_the_name_of_its_owner(fleet: Fleet) -> None:
    cache = fleet.add("cache")
    cache.launch()
    cache.wait_ready()
    second = run_kakeya("cache", "--bind", cache.address, home=fleet.home)
    assert second.returncode == 5
    assert f"by a kakeya cache (process {cache.pid})" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        third = run_kakeya("cache", "--bind", f"127.0.0.1:{port}", home=fleet.home)
        assert third.returncode == 5
        assert Path(sys.executable).resolve().name[:6] in third.stderr
        assert "(process " in third.stderr


def test_a_node_short_of_memory_takes_no_sessions_and_says_so(fleet: Fleet) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    levels = ("--memory-warning-gb", "0.01", "--memory-drain-gb", "0.01", "--memory-unhealthy-gb", "0.01")
    fleet.start("primary", primary=(*levels, "--memory-poll-s", "0.1", "--runtime-health-port", str(port)))
    with fleet["primary"].client() as client:
        wait_until(lambda: client.status().sections["memory"]["level"] == "unhealthy", "the level is seen")
        assert _refused(client).code is FailureCode.RESOURCE_EXHAUSTED
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10)
    with caught.value as error:
        assert error.code == 503


def test_json_logs_are_json_to_the_last_line(fleet: Fleet) -> None:
    cache = fleet.add("cache", "--log-format", "json")
    cache.launch()
    cache.wait_ready()
    assert cache.terminate() == 0
    lines = [json.loads(line) for line in cache.log.read_text(encoding="utf-8").splitlines()]
    assert any("serves on" in line["text"] for line in lines)
    assert lines[-1]["text"].startswith("stopped")


def test_a_stalled_decode_ends_the_daemon_with_an_error_and_a_slow_load_does_not(fleet: Fleet) -> None:
    """So that launchd or systemd starts it again."""
    stall_s = SLOW_LOAD_S / 2
    flags = ("--decode-stall-s", str(stall_s), "--memory-poll-s", "0.1")
    primary = fleet.add("primary", *flags, program=("tests.deploy.hanging_primary",))
    primary.launch()
    primary.wait_ready()
    with primary.client() as client:
        session = client.create_session()
        session.append(prompt(100, seed=5))
        answer = session.generate(50, inter_token_timeout_s=60)
        assert len([next(answer) for _ in range(TOKENS_BEFORE_HANG)]) == TOKENS_BEFORE_HANG
        with pytest.raises(RequestFailed):
            next(answer)
        assert primary.process is not None
        assert primary.process.wait(30) == 1
    assert "the model has been in one step for" in primary.last_lines()
