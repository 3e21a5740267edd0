"""One attempt to have a worker compute: what it is asked for, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kakeya_zmq.blocks import checkpoint_parts, needed_parts
from kakeya_zmq.planner import (
    LINK_MEGABITS_PER_SECOND_DEFAULT,
    SEGMENT_TOKENS_DEFAULT,
    MeasuredRates,
    checkpoint_spacing,
    decide_link_codec,
)
from kakeya_zmq.protocol.effects import Ask, AskId, CancelAsk, CloseLane, Effect, LaneId
from kakeya_zmq.protocol.estimates import Estimates
from kakeya_zmq.protocol.hedge import OBSERVE_MIN_S, Watch
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.offload_seal import PROVE_WITHIN_S, SealedJob, newcomer_proves_within_s, quick_s, seal_job
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask, WorkerView
from wire.ids import NodeId
from wire.messages import LinkCodec, PartRef, SubmitJob

SEGMENT_TOKENS = SEGMENT_TOKENS_DEFAULT
"""Tokens a worker computes between two signs of life; its grid is its own, this is the default."""


@dataclass(slots=True)
class Attempt:
    ask: AskId
    node_id: NodeId
    wanted: tuple[PartRef, ...]
    checkpoint_tokens: int
    """How far the checkpoints lie apart that it sends on its way; 0: it sends none."""
    checkpoints: tuple[PartRef, ...]
    """What they are made of; may come or not."""
    base: int
    """Tokens that are at hand without it."""
    job: SealedJob
    started: float
    patience_s: float
    stall_deadline: float
    computing: Watch
    """Counts tokens, behind ``computed_from``."""
    computed_from: int
    """Where the worker's own store is taken to end."""
    sending: Watch
    """Counts bytes; of nothing where they do not come evenly."""
    check_at: float
    worker: WorkerView
    newcomer: bool
    """It has never proven itself here, and has not yet now."""
    patient: bool
    """Its first word is waited for as long as that of one that has proven itself before."""
    lane: LaneId | None = None
    ask_open: bool = True

    def remaining_s(self, now: float) -> float:
        """Projected time until everything has come."""
        if self.sending.done <= 0:
            return self.computing.remaining_s(now)
        return max(self.computing.remaining_s(now), self.sending.remaining_s(now))

    def cost_time(self, now: float) -> bool:
        """Whether it took longer than the way to the worker and back, and work that is none."""
        return now - self.started > quick_s(self.worker)

    def drop(self, reason: str) -> list[Effect]:
        """Leave nothing of it open."""
        effects: list[Effect] = []
        if self.lane is not None:
            effects.append(CloseLane(self.lane, ok=False, reason=reason))
        if self.ask_open:
            effects.append(CancelAsk(self.ask))
        return effects


class Attempts:
    """Makes the attempts of one offload.

    Args:
        task: the preparation's.
        holdings: what is at hand.
        ids: numbers for asks.
        rates: measured.
        estimates: of what jobs take.
        random_bytes: n → n random bytes, for job ids.
    """

    def __init__(
        self,
        task: PreparationTask,
        holdings: Holdings,
        ids: IdAllocator,
        rates: MeasuredRates,
        estimates: Estimates,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._task = task
        self._settings = task.settings
        self._holdings = holdings
        self._account = holdings.account
        self._ids = ids
        self._rates = rates
        self._estimates = estimates
        self._random_bytes = random_bytes

    def begin(self, node_id: NodeId, base: int, now: float, *, patient: bool = False) -> Attempt:
        """For what a hit at the target needs beyond ``base``; ``patient``: wait for a newcomer as for others."""
        task = self._task
        starts = {block.block_hash: block.start for block in task.chain.blocks}
        # A part beyond the base that happens to be at hand stays in the list: the worker will send it, not knowing of it.
        wanted = tuple(
            ref for ref in needed_parts(task.chain, task.target, task.facts.requirement) if starts[ref.block_hash] >= base
        )
        worker = next(worker for worker in task.workers if worker.node_id == node_id)
        patience_s, expected_s = self._patience_s(worker), self._estimates.job_ms(worker, base) / 1000.0
        work_s = self._estimates.job_ms(worker, base, queued=False) / 1000.0
        # Without full attention most parts come at the very end.
        even_bytes = self._estimates.job_bytes(base) if task.facts.requirement.full else 0
        every = self._checkpoint_tokens(worker, base)
        newcomer = self._rates.backoff.is_newcomer(worker.identity_public_key)
        first_word_s = newcomer_proves_within_s(worker) if newcomer and not patient else PROVE_WITHIN_S
        stall_deadline = now + min(patience_s, first_word_s)
        return Attempt(
            ask=self._ids.ask(),
            node_id=node_id,
            wanted=wanted,
            checkpoint_tokens=every,
            checkpoints=checkpoint_parts(task.chain, every, base, task.facts.requirement),
            base=base,
            job=seal_job(task, worker, self._random_bytes),
            started=now,
            patience_s=patience_s,
            stall_deadline=stall_deadline,
            computing=Watch(now, expected_s, self._estimates.job_tokens(node_id), work_s),
            computed_from=task.target - self._estimates.job_tokens(node_id),
            sending=Watch(now, expected_s, even_bytes, work_s),
            # A newcomer is not judged by its speed before it has said a word.
            check_at=stall_deadline if newcomer else now + OBSERVE_MIN_S,
            worker=worker,
            newcomer=newcomer,
            patient=patient or not newcomer,
        )

    def submission(self, attempt: Attempt, timeout_s: float) -> Ask:
        """What is sent to the worker."""
        task, settings = self._task, self._settings
        size_bytes = self._estimates.job_bytes(attempt.base)
        link = decide_link_codec(
            settings.link_compression, attempt.node_id, size_bytes, self._rates, frame_bytes=settings.chunk_bytes
        )
        if link.codec is not LinkCodec.NONE:
            self._account.reason(link.describe())
        body = SubmitJob(
            job_id=attempt.job.job_id,
            fingerprint=task.fingerprint,
            prompt=attempt.job.prompt,
            have_tokens=attempt.base,
            suites=settings.suites,
            chunk_bytes_max=settings.chunk_bytes,
            credit_bytes=settings.credit_bytes,
            link_codec=link.codec,
            value_bytes=settings.value_bytes,
            checkpoint_tokens=attempt.checkpoint_tokens,
        )
        return Ask(attempt.ask, attempt.node_id, body, timeout_s)

    def _checkpoint_tokens(self, worker: WorkerView, base: int) -> int:
        """How far the checkpoints of a job are to lie apart; 0: none are worth it, or there is no room for them."""
        task = self._task
        requirement, (_, window_bytes, state_bytes) = task.facts.requirement, task.facts.part_bytes_per_token
        checkpoint_bytes = window_bytes * requirement.window_tokens + (state_bytes if requirement.state else 0)
        if checkpoint_bytes <= 0:
            return 0
        every = checkpoint_spacing(
            checkpoint_bytes,
            requirement.window_tokens,
            math.lcm(SEGMENT_TOKENS, requirement.block_tokens),
            self._rates.worker_tokens_per_second(worker.node_id, worker.prefill_tokens_per_second),
            worker.megabytes_per_second or LINK_MEGABITS_PER_SECOND_DEFAULT / 8,
        )
        count = (task.target - 1) // every - base // every
        moved_bytes = self._holdings.received_bytes + self._estimates.job_bytes(base) + count * checkpoint_bytes
        return every if count > 0 and moved_bytes <= self._settings.max_import_bytes else 0

    def _patience_s(self, worker: WorkerView) -> float:
        """For how long a worker may be silent."""
        speed = self._rates.worker_tokens_per_second(worker.node_id, worker.prefill_tokens_per_second)
        return self._settings.worker_stall_timeout_s + 2 * SEGMENT_TOKENS / speed
