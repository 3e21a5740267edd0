"""The cost model against figures worked out by hand, and the choice among routes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kakeya_zmq.planner import EXPLORE_EVERY, MeasuredRates, PassedOver
from kakeya_zmq.protocol.estimates import Estimates, LinkShare
from kakeya_zmq.protocol.prepare_values import PreparationSettings, PreparationTask, WorkerView
from kakeya_zmq.protocol.routes import HERE, Route, RouteChoice, choose_route
from tests.unit.preparation_kit import (
    FINGERPRINT,
    FULL,
    JOB_KEYS,
    OWN_KEY,
    STATEFUL,
    WINDOWED,
    chain_of,
    facts_of,
    tokens_of,
)
from wire.ids import NodeId
from wire.messages import PrefillPolicy, Requirement

A, W = NodeId("a"), NodeId("w")


def estimates(
    *,
    tokens: int = 1024,
    requirement: Requirement = FULL,
    local: float = 1000.0,
    penalty_ms: float = 0.0,
    workers: tuple[WorkerView, ...] = (),
    policy: PrefillPolicy = PrefillPolicy.LOCAL_FALLBACK,
    held: int = 0,
) -> Estimates:
    """Costs for a prompt of which ``tokens`` have to be there; imports into the engine are as good as free.

    Args:
        held: what the worker holds itself.
    """
    history = tokens_of(tokens + 1)
    task = PreparationTask(
        session_id="s",
        tokens=history,
        live_position=0,
        chain=chain_of(history[:-1]),
        facts=facts_of(requirement),
        fingerprint=FINGERPRINT,
        policy=policy,
        workers=workers,
        settings=PreparationSettings(compute_penalty_ms=penalty_ms),
        job_keys=JOB_KEYS,
        identity_public_key=OWN_KEY,
    )
    rates = MeasuredRates()
    rates.local.assume(local)
    rates.imports.assume(1e12)
    return Estimates(task, rates, {W: held})


def link(megabytes: float, rate: float, round_trip_ms: float = 1.0, node_id: NodeId = A) -> LinkShare:
    return LinkShare(node_id, int(megabytes * 1e6), round_trip_ms, rate)


def worker(rate: float, queued: int = 0, node_id: NodeId = W, memory: int = 0) -> WorkerView:
    return WorkerView(node_id, bytes(32), rate, queued, 1.0, 1000.0, memory)


# --- what things cost ------------------------------------------------------------------------------------------------


def test_computing_here_costs_its_time_and_the_penalty() -> None:
    assert estimates().here(0).cost_ms == 1024.0
    assert estimates().here(1000).cost_ms == 24.0
    assert estimates(penalty_ms=5000.0).here(0).cost_ms == 6024.0
    assert estimates(penalty_ms=5000.0).here(1024).cost_ms == 0.0, "nothing to do costs nothing"


def test_half_of_the_tokens_cost_half_of_the_penalty() -> None:
    model = estimates(penalty_ms=5000.0)
    (route,) = model.imports(0, 512, [link(1.0, 100.0)], ())
    assert route.effort_ms == pytest.approx(1.0 + 10.0)
    assert route.replaces_ms == pytest.approx(512 + 2500)
    assert route.rest_ms == pytest.approx(512 + 2500)


def test_a_small_rest_that_nobody_is_asked_for_carries_no_penalty() -> None:
    model = estimates(penalty_ms=1e8, workers=(worker(8000.0),))
    routes = [*model.imports(0, 1008, [link(1.0, 100.0)], model.workers()), model.job(worker(8000.0), 0, 0), model.here(0)]
    choice = choose_route(routes, minimum_savings_ratio=0.1)
    assert choice.chosen is not None
    assert choice.chosen.name == "import from a then compute"
    assert choice.chosen.cost_ms == pytest.approx(11.0 + 16.0)


def test_peers_deliver_side_by_side_so_the_slowest_counts() -> None:
    model = estimates()
    assert model.transfer_ms([link(1.0, 1.0), link(0.001, 1000.0)]) == pytest.approx(1001.0)


@pytest.mark.parametrize(
    ("requirement", "base", "expected"),
    [
        # 1,024 tokens of 3 bytes; blocks of 16.
        (FULL, 0, 3 * 1024),
        (FULL, 512, 3 * 512),
        # Window of 24 at 1,024: blocks from 992 on; the sink of 4: block 0.
        (WINDOWED, 0, 3 * 1024 + 3 * 32 + 3 * 16),
        (WINDOWED, 512, 3 * 512 + 3 * 32),
        # One checkpoint of 48 bytes, at the end.
        (STATEFUL, 0, 3 * 1024 + 48),
        (STATEFUL, 1024, 0),
    ],
)
def test_a_job_moves_what_a_hit_at_the_target_needs(requirement: Requirement, base: int, expected: int) -> None:
    assert estimates(requirement=requirement).job_bytes(base) == expected


def test_a_job_costs_queue_computation_and_the_part_of_the_transfer_that_is_not_hidden() -> None:
    model = estimates()
    # 256 tokens queued at 512 a second; 1,024 tokens take 2 s in four segments; 3,072 bytes at 1 GB/s and 1 ms.
    transfer = 1.0 + 3072 / 1e6
    assert model.job_ms(worker(512.0, queued=256), 0) == pytest.approx(500.0 + 2000.0 + transfer / 4)


def test_measured_speed_of_a_worker_beats_what_its_card_says() -> None:
    history = tokens_of(1025)
    task = PreparationTask(
        "s", history, 0, chain_of(history[:-1]), facts_of(FULL), FINGERPRINT, PrefillPolicy.LOCAL_FALLBACK
    )
    rates = MeasuredRates()
    rates.observe_worker(W, 256, 1000.0)
    assert Estimates(task, rates, {}).job_ms(worker(10_000.0), 0) == pytest.approx(4000.0, abs=1.0)


# --- the choice ------------------------------------------------------------------------------------------------------

TABLE = [
    # local tok/s, penalty, link MB/s, MB for everything, worker tok/s, queued → chosen
    pytest.param(1000, 0, 100.0, 10.0, 0, 0, "import from a", id="a quick link"),
    pytest.param(1000, 0, 1.0, 10.0, 0, 0, HERE, id="a slow link: 10 s against 1 s"),
    pytest.param(1000, 0, 10.8, 10.0, 0, 0, HERE, id="saves less than a tenth: 927 ms against 1,024"),
    pytest.param(1000, 0, 11.0, 10.0, 0, 0, "import from a", id="saves just a tenth: 910 ms"),
    pytest.param(1000, 20_000, 1.0, 10.0, 0, 0, "import from a", id="decode must not wait"),
    pytest.param(1000, 0, 1.0, 10.0, 4000, 0, "worker w", id="a quick worker, a slow link to the cache"),
    pytest.param(1000, 0, 1.0, 10.0, 4000, 4000, HERE, id="the quick worker has a queue of a second"),
    pytest.param(1000, 0, 100.0, 10.0, 4000, 0, "import from a", id="101 ms to import, 256 to compute there"),
    pytest.param(1000, 0, 30.0, 10.0, 4000, 0, "worker w", id="334 ms to import, 256 to compute there"),
    pytest.param(1000, 0, 1.0, 10.0, 1100, 0, HERE, id="a worker that is hardly quicker"),
]


@pytest.mark.parametrize(("local", "penalty", "rate", "size", "speed", "queued", "chosen"), TABLE)
def test_the_cheapest_way_is_taken(
    local: float, penalty: float, rate: float, size: float, speed: float, queued: int, chosen: str
) -> None:
    workers = (worker(speed, queued),) if speed else ()
    model = estimates(local=local, penalty_ms=penalty, workers=workers)
    routes = [
        *model.imports(0, 1024, [link(size, rate)], workers),
        *(model.job(one, 0, 0) for one in workers),
        model.here(0),
    ]
    choice = choose_route(routes, minimum_savings_ratio=0.1)
    assert choice.chosen is not None
    assert choice.chosen.name == chosen
    decision = choice.decision("prefix")
    assert decision.chosen == chosen
    assert decision.costs_ms.keys() == {route.name for route in routes}
    assert decision.costs_ms[chosen] == pytest.approx(choice.chosen.cost_ms, abs=0.001)


def test_a_partial_import_may_be_continued_by_a_worker_that_holds_the_beginning_itself() -> None:
    quick = replace(worker(8000.0), megabytes_per_second=0.03)

    def choose(held: int) -> RouteChoice:
        model = estimates(workers=(quick,), held=held)
        routes = [*model.imports(0, 768, [link(1.0, 100.0)], (quick,)), model.job(quick, 0, 0), model.here(0)]
        return choose_route(routes, minimum_savings_ratio=0.1)

    chosen = choose(768).chosen
    assert chosen is not None
    # 11 ms of import, and 32 ms for 256 tokens beside 27 ms for their KV; from the worker alone, 103 ms for all of it.
    assert chosen.name == "import from a then worker w"
    assert chosen.cost_ms == pytest.approx(11.0 + 32.0 + 26.6, abs=1.0)
    # One that holds nothing computes all of the prompt, whatever it has to send.
    names = {route.name: route.cost_ms for route in choose(0).routes}
    assert names["import from a then worker w"] == pytest.approx(11.0 + 128.0 + 26.6 / 4, abs=1.5)


def test_a_job_counts_the_tokens_that_the_worker_does_not_hold() -> None:
    assert estimates(held=1000).job_ms(worker(1000.0), 512) == pytest.approx(24.0, abs=3.0)
    assert estimates(held=0).job_ms(worker(1000.0), 512) == pytest.approx(1024.0, abs=3.0)


def test_too_few_tokens_are_no_job() -> None:
    model = estimates(workers=(worker(8000.0),))
    assert [route.name for route in model.imports(0, 1008, [link(1.0, 100.0)], model.workers())] == [
        "import from a then compute"
    ]


def test_remote_required_takes_whatever_computes_nothing_here() -> None:
    slow = worker(1.0)
    model = estimates(workers=(slow,), policy=PrefillPolicy.REMOTE_REQUIRED)
    routes = [*model.imports(0, 1024, [link(10.0, 0.001)], ()), model.job(slow, 0, 0), model.here(0)]
    choice = choose_route(routes, minimum_savings_ratio=0.1, remote_required=True)
    assert choice.chosen is not None
    assert choice.chosen.name == "worker w"
    assert choice.refusals() == ()
    only_part = [*model.imports(0, 512, [link(1.0, 100.0)], ()), model.here(0)]
    nobody = choose_route(only_part, minimum_savings_ratio=0.1, remote_required=True)
    assert nobody.chosen is None
    assert nobody.decision("prefix").chosen == ""


def test_of_equal_workers_the_one_with_more_memory_then_the_smaller_name_is_taken() -> None:
    names = [worker(5000.0, 0, NodeId(name), memory) for name, memory in (("b", 0), ("a", 0), ("z", 1 << 30))]
    model = estimates(workers=tuple(names))
    assert [one.node_id for one in model.workers()] == ["z", "a", "b"]
    choice = choose_route([model.job(one, 0, 0) for one in model.workers()], minimum_savings_ratio=0.1)
    assert [route.worker for route in choice.routes] == ["z", "a", "b"]


def test_refusals_give_the_numbers() -> None:
    model = estimates()
    choice = choose_route([*model.imports(0, 1024, [link(10.0, 1.0)], ()), model.here(0)], minimum_savings_ratio=0.1)
    assert choice.refusals() == (
        "importing 1024 tokens (10.0 MB) from a does not pay: 10001 ms against 1024 ms of prefill here",
    )
    assert choice.decision("prefix").text == "compute here: 1024 ms against 10001 ms to import from a"


def test_a_worker_that_was_measured_in_a_bad_moment_gets_another_chance() -> None:
    passed = PassedOver()
    routes = [Route("worker w", 1800.0, 1000.0, worker=W), Route(HERE, 0.0, 1000.0, rest_ms=1000.0)]
    chosen = [choose_route(routes, minimum_savings_ratio=0.1, passed_over=passed) for _ in range(2 * EXPLORE_EVERY + 2)]
    taken = [number for number, choice in enumerate(chosen) if choice.chosen is not None and choice.chosen.worker]
    assert taken == [EXPLORE_EVERY, 2 * EXPLORE_EVERY + 1]
    assert chosen[EXPLORE_EVERY].explored
    assert chosen[EXPLORE_EVERY].decision("rest").text.endswith("to measure it again")


def test_looking_again_costs_an_eighth_of_the_time_at_most() -> None:
    for ratio in (1.5, 3.0, 9.0, 50.0):
        passed = PassedOver()
        routes = [Route("worker w", 1000.0 * ratio, 1000.0, worker=W), Route(HERE, 0.0, 1000.0, rest_ms=1000.0)]
        spent = best = 0.0
        for _ in range(1000):
            choice = choose_route(routes, minimum_savings_ratio=0.1, passed_over=passed)
            assert choice.chosen is not None
            spent, best = spent + choice.chosen.cost_ms, best + 1000.0
        assert spent <= best * 1.13
        assert spent > best, "it was looked at again"


@pytest.mark.parametrize("remote_required", [False, True])
def test_among_workers_of_like_cost_a_proven_one_is_taken(remote_required: bool) -> None:
    new, old = NodeId("new"), NodeId("old")

    def taken(newcomers_ms: float) -> object:
        routes = [
            Route("worker new", newcomers_ms, 1e6, worker=new, proven=False),
            Route("worker old", 100.0, 1e6, worker=old),
            Route(HERE, 0.0, 1e6, rest_ms=1e6),
        ]
        choice = choose_route(routes, minimum_savings_ratio=0.1, remote_required=remote_required)
        return choice.chosen and choice.chosen.worker

    assert taken(81.0) == old
    assert taken(79.0) == new, "its word counts until it is found out"
