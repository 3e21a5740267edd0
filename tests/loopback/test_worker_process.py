"""A real worker process that two primaries use: shared work, an adaptive cache, and settings that contradict each other."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, Reference, ask, figure, prompt, wait_idle, wait_until, worker_only
from wire.limits import GIB, MIB

PROMPT_TOKENS = 3000
ADAPTIVE = ("--adaptive-cache", "--cache-min-gb", "0.03125", "--memory-reserve-gb", "0.125")


@pytest.fixture(scope="module")
def fleet(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker", worker=ADAPTIVE)
    empty_fleet.launch(empty_fleet.add("primary", name="second"))
    return empty_fleet


def test_two_primaries_with_one_prompt_cost_the_worker_one_computation(fleet: Fleet, reference: Reference) -> None:
    tokens = prompt(PROMPT_TOKENS, 11)
    expected = reference.answer(tokens, 8)
    with fleet["worker"].client() as worker, fleet["primary"].client() as first, fleet["second"].client() as second:

        def knows_worker() -> bool:
            return any(row["node_id"] == "worker" and row.get("state") == "up" for row in second.status().peers)

        wait_until(knows_worker, "the second primary knows the worker")
        before = figure(worker, "prefill", "job_tokens_computed")
        answers: dict[str, list[int]] = {}

        def one(name: str, client: rig.Client) -> None:
            with worker_only(client) as session:
                answers[name] = list(ask(session, tokens, 8).tokens)

        threads = [threading.Thread(target=one, args=pair) for pair in (("first", first), ("second", second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == {"first": expected, "second": expected}
        assert figure(worker, "prefill", "job_tokens_computed") - before == PROMPT_TOKENS - 1
        assert figure(worker, "prefill", "jobs_completed") == 2
        wait_idle(worker)
        assert figure(worker, "cache", "bytes_reserved") == 0


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="the limit of another process is not told here")
@pytest.mark.parametrize("name", ["primary", "worker"])
def test_a_node_with_a_model_has_the_open_files_that_it_says(fleet: Fleet, name: str) -> None:
    with fleet[name].client() as client:
        told = figure(client, "node", "descriptors_max")
    soft, _ = psutil.Process(fleet[name].pid).rlimit(psutil.RLIMIT_NOFILE)
    assert told == soft


def test_a_node_of_the_same_name_does_not_start_on_one_machine(fleet: Fleet, model: Path) -> None:
    with Fleet(model, fleet.home / "elsewhere") as other:
        twin = other.add("worker")
        twin.environment = {"KAKEYA_HOME": str(fleet.home)}
        twin.launch(fleet["primary"].address)
        assert twin.process is not None
        assert twin.process.wait(rig.START_TIMEOUT_S) == 5
        line = twin.last_lines(1)
        assert f"the node id worker is already in use on this machine by process {fleet['worker'].pid}" in line
        assert "Traceback" not in twin.last_lines()


def test_an_adaptive_worker_takes_what_the_machine_leaves(fleet: Fleet) -> None:
    with fleet["worker"].client() as worker:
        wait_until(lambda: figure(worker, "budget", "model_bytes") > 0, "the model was measured")
        figures = worker.status().sections["budget"]
        assert (figures["floor_bytes"], figures["ceiling_bytes"], figures["reserve_bytes"]) == (32 * MIB, GIB, 128 * MIB)
        left = int(figures["physical_bytes"] or 0) - int(figures["model_bytes"] or 0) - 128 * MIB
        assert 32 * MIB <= int(figures["target_bytes"] or 0) <= min(GIB, max(left, 32 * MIB))

        def fits() -> bool:
            return figure(worker, "cache", "max_bytes") == figure(worker, "budget", "target_bytes")

        wait_until(fits, "the store has its size")


def test_a_floor_above_the_ceiling_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    sizes = ("--adaptive-cache", "--cache-gb", "0.1", "--cache-min-gb", "0.25")
    flags = ("--model", str(model), "--bind", "127.0.0.1:0", *sizes)
    made = rig.run_kakeya("key", "new", home=tmp_path)
    assert made.returncode == 0, made.stderr
    refused = rig.run_kakeya("worker", *flags, home=tmp_path)
    assert refused.returncode == 2
    assert "0.25" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert "--cache-min-gb" in refused.stderr
    assert "Traceback" not in refused.stderr
