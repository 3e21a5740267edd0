"""Prefill jobs as the feed tells them, of workers and of primaries."""

from __future__ import annotations

import pytest

from kakeya_zmq.engine import CommandFailed
from kakeya_zmq.protocol import effects as fx
from kakeya_zmq.telemetry_feed import (
    Subscribed,
)
from kakeya_zmq.telemetry_feed_jobs import JOBS_MAX
from tests.unit.telemetry_kit import (
    Rig,
    accepted,
    append,
    grant,
    key,
    prefill,
    prefilling,
    progress,
    published,
    result,
    segment,
    submit,
)
from wire.bus import Topic
from wire.errors import FailureCode
from wire.events import (
    Event,
    JobEvent,
)
from wire.messages import (
    SourceKind,
    TransferDone,
)


def test_a_job_is_told_from_its_acceptance_to_its_end() -> None:
    rig = Rig()
    assert rig.told(submit(1)) == []
    (queued,) = rig.told(accepted(1, eta_ms=700))
    assert queued == JobEvent(job_id=(b"j" * 16).hex(), state="queued", asker="primary", tokens_total=1_000, eta_ms=700.0)
    rig.now += 1
    (running,) = rig.told(fx.SendProgress(key(1), grant()))
    assert isinstance(running, JobEvent)
    assert (running.state, running.elapsed_ms) == ("running", 1_000.0)
    rig.told(progress(1, 100, reused=100))
    rig.now += 1
    (half,) = rig.told(progress(1, 500, reused=100))
    assert isinstance(half, JobEvent)
    assert (half.tokens_done, half.tokens_reused, half.tokens_per_second, half.eta_ms) == (500, 100, 400.0, 1_250.0)
    (done,) = rig.told(result(1, computed=900, reused=100))
    assert isinstance(done, JobEvent)
    assert (done.state, done.tokens_done, done.tokens_reused, done.tokens_per_second) == ("completed", 1_000, 100, 1_800.0)
    assert rig.told(progress(1, 1_000), fx.RequestCancelled(key(1), "late")) == []


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (fx.SendFailure(key(1), FailureCode.INTERNAL, "prefill failed"), "failed", "prefill failed"),
        (fx.SendFailure(key(1), FailureCode.CANCELLED, "no longer wanted"), "cancelled", "no longer wanted"),
        (fx.RequestCancelled(key(1), "the peer at 10.0.0.7:51051 is gone"), "cancelled", "the peer at (address) is gone"),
    ],
)
def test_a_job_that_does_not_end_well_says_why(end: object, state: str, reason: str) -> None:
    rig = Rig()
    rig.told(submit(1), accepted(1))
    (event,) = rig.told(end)
    assert isinstance(event, JobEvent)
    assert (event.state, event.reason) == (state, reason)


def test_an_asker_that_has_everything_may_hang_up() -> None:
    rig = Rig()
    rig.told(submit(1), accepted(1), fx.UpdateArrived(key(1), TransferDone(complete=True)))
    (event,) = rig.told(fx.RequestCancelled(key(1), "the connection ended"))
    assert isinstance(event, JobEvent)
    assert (event.state, event.reason, event.tokens_done) == ("completed", "", 1_000)


def test_a_job_that_is_taken_over_goes_on_under_its_id() -> None:
    rig = Rig()
    rig.told(submit(1), accepted(1), progress(1, 300))
    rig.now += 1
    assert rig.told(submit(2), fx.SendFailure(key(1), FailureCode.ABORTED, "taken over"), accepted(2)) == []
    (event,) = rig.told(progress(2, 600))
    assert isinstance(event, JobEvent)
    assert (event.job_id, event.tokens_done, event.state) == ((b"j" * 16).hex(), 600, "running")
    (end,) = rig.told(result(2))
    assert isinstance(end, JobEvent)
    assert end.state == "completed"


def test_progress_is_told_four_times_a_second_and_the_last_of_it_is_not_lost() -> None:
    rig = Rig(frozenset({Topic.JOB}))
    rig.told(submit(1), accepted(1), progress(1, 0))
    heard: list[Event] = []
    for done in range(10, 1_000, 10):
        rig.now += 0.01
        heard += rig.told(progress(1, done))
    assert len(heard) == 3
    last = published(rig.later(1.0))
    assert [event.tokens_done for event in last if isinstance(event, JobEvent)] == [990]
    assert published(rig.later(5.0)) == []
    assert rig.feed.deadline() is None


def test_progress_never_goes_back() -> None:
    rig = Rig()
    rig.told(submit(1), accepted(1), progress(1, 500))
    rig.now += 1
    (event,) = rig.told(progress(1, 400))
    assert isinstance(event, JobEvent)
    assert event.tokens_done == 500


def test_the_job_table_is_bounded() -> None:
    rig = Rig(frozenset({Topic.JOB}))
    for number in range(JOBS_MAX + 50):
        rig.told(submit(number, tokens=2, job=number.to_bytes(16, "big")), accepted(number))
    rig.now += 1
    replayed = published(rig.see(Subscribed(Topic.JOB)))
    assert len(replayed) == JOBS_MAX


def test_a_local_prefill_is_a_job_of_the_primary() -> None:
    rig = Rig()
    assert rig.told(append(1), prefilling(1, 0, 1_000, SourceKind.LIVE)) == []
    (running,) = rig.told(prefill(5, 400))
    assert isinstance(running, JobEvent)
    assert (running.place, running.state, running.asker) == ("primary", "running", "client-1")
    assert (running.tokens_total, running.tokens_done, running.tokens_reused) == (1_000, 600, 600)
    rig.now += 1
    (half,) = rig.told(segment(5, 800))
    assert isinstance(half, JobEvent)
    assert (half.tokens_done, half.tokens_per_second) == (800, 200.0)
    (done,) = rig.told(segment(5, 1_000), fx.CommandEnded(fx.Ticket(5), cancelled=False, position=1_000))
    assert isinstance(done, JobEvent)
    assert (done.state, done.tokens_done, done.job_id) == ("completed", 1_000, running.job_id)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ((fx.CommandEnded(fx.Ticket(5), cancelled=True, position=0),), "cancelled"),
        ((fx.CommandEnded(fx.Ticket(5), cancelled=False, position=100),), "failed"),
        (
            (
                fx.CommandEvent(fx.Ticket(5), CommandFailed("sess-1", "out of memory", 0)),
                fx.CommandEnded(fx.Ticket(5), cancelled=False, position=0),
            ),
            "failed",
        ),
    ],
)
def test_a_local_prefill_that_does_not_end_well(seen: tuple[object, ...], state: str) -> None:
    rig = Rig()
    rig.told(append(1), prefill(5, 400), prefilling(1, 0, 400))
    (event,) = rig.told(*seen)
    assert isinstance(event, JobEvent)
    assert event.state == state


def test_prefills_of_no_append_are_no_jobs() -> None:
    assert Rig().told(prefill(5, 400, session="job-1")) == []
