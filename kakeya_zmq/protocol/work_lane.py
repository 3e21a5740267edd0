"""The lane of a job: what it is bound with, what it gets when, and how the job lets go of it."""

from __future__ import annotations

from kakeya_zmq.protocol.effects import BindSender, CloseLane, Effect, FeedSender, LaneId
from kakeya_zmq.protocol.work_job import Job, JobPhase
from wire.bulk import choose_suite
from wire.limits import CHUNK_BYTES_DEFAULT, TRANSFER_BYTES_MAX
from wire.messages import SubmitJob


def lane_bytes(body: SubmitJob) -> tuple[int, int]:
    """(chunk bytes, credit bytes) of the job's lane: a chunk larger than the credit could never be sent."""
    credit_bytes = min(body.credit_bytes, TRANSFER_BYTES_MAX)
    return min(body.chunk_bytes_max, CHUNK_BYTES_DEFAULT, credit_bytes), credit_bytes


def bind_lane(job: Job, lane: LaneId, *, has_aes: bool) -> list[Effect]:
    """Give the job a lane; LaneOpened tells when it can be fed."""
    chunk_bytes, credit_bytes = lane_bytes(job.body)
    job.lane = lane
    job.lane_ready = False
    suite = choose_suite(job.body.suites, has_aes=has_aes)
    return [BindSender(lane, suite, chunk_bytes, credit_bytes, job.body.link_codec, job.body.value_bytes)]


def feed_lane(job: Job) -> list[Effect]:
    """Give the lane what it has not got yet; the final feed happens once for each lane."""
    if job.lane is None or not job.lane_ready or job.final_fed or job.asker_done:
        return []
    if job.phase is JobPhase.IMPORTING:
        # Parts of a prefix that is still being imported may yet turn out bad.
        return []
    fresh = tuple(job.ready[job.fed :])
    if not fresh and not job.ready_final:
        return []
    job.fed = len(job.ready)
    job.final_fed = job.ready_final
    return [FeedSender(job.lane, fresh, job.ready_final)]


def drop_lane(job: Job, reason: str) -> list[Effect]:
    """Let go of the lane; it ends without us."""
    lane, job.lane, job.lane_ready = job.lane, None, False
    # Once the asker is done the lane is closing already, and well.
    return [] if lane is None or job.asker_done else [CloseLane(lane, False, reason)]
