"""What the ways to prepare one prompt are expected to cost: measured rates applied to this prompt's tokens and bytes.

Bytes are those a hit moves: a window part counts only where the window at the end of the stretch needs it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kakeya_zmq.blocks import needed_parts
from kakeya_zmq.planner import BYTES_PER_MS_OF_ONE_MEGABYTE_PER_SECOND, MeasuredRates, compute_ms, import_ms, worker_ms
from kakeya_zmq.protocol.prepare_values import PeerView, PreparationTask, WorkerView
from kakeya_zmq.protocol.routes import HERE, Route
from wire.ids import NodeId
from wire.messages import PartKind


@dataclass(frozen=True, slots=True)
class LinkShare:
    """What one peer would have to deliver."""

    node_id: NodeId
    size_bytes: int
    round_trip_ms: float
    megabytes_per_second: float | None


class Estimates:
    """Costs of one preparation, in milliseconds.

    Args:
        task: the preparation's.
        rates: measured; read only.
        held_by: node id to the position up to which that node can do without computing; kept up to date by its owner.
    """

    def __init__(self, task: PreparationTask, rates: MeasuredRates, held_by: Mapping[NodeId, int]) -> None:
        self._task = task
        self._rates = rates
        self._held_by = held_by
        self._job_starts: list[int] = []
        self._job_bytes: list[int] = []
        """Bytes of the parts of a hit at the target from the one of the same index on; 0 at the end."""

    # --- here --------------------------------------------------------------------------------------------------------

    def compute_ms(self, tokens: int) -> float:
        """Plain time of prefill here."""
        return compute_ms(tokens, self._rates.local.value)

    def here_ms(self, tokens: int, of_tokens: int) -> float:
        """The same with this stretch's share of the penalty, when ``of_tokens`` are to be had in all.

        A rest that is always computed here, being too small for a job, has none: it cannot be had otherwise.
        """
        if tokens <= 0:
            return 0.0
        if tokens < of_tokens and not self.worth_a_job(tokens):
            return self.compute_ms(tokens)
        return self.compute_ms(tokens) + self._task.settings.compute_penalty_ms * tokens / max(tokens, of_tokens)

    def here(self, at_hand: int) -> Route:
        """Compute everything behind ``at_hand`` on this machine."""
        tokens = self._task.target - at_hand
        cost = self.here_ms(tokens, tokens)
        return Route(HERE, 0.0, cost, rest_ms=cost, text=f"computing {tokens} tokens here")

    def rest_ms(self, position: int, at_hand: int) -> float:
        """The least it takes from ``position`` to the target, here or by a worker."""
        tokens = self._task.target - position
        jobs = [self.job_ms(worker, position) for worker in self.workers()] if self.worth_a_job(tokens) else []
        here = [] if self._task.remote_required and jobs else [self.here_ms(tokens, self._task.target - at_hand)]
        return min([*jobs, *here])

    # --- caches ------------------------------------------------------------------------------------------------------

    def transfer_ms(self, shares: Sequence[LinkShare]) -> float:
        """Until all shares are in the engine: peers deliver side by side, so the slowest counts."""
        size_bytes = sum(share.size_bytes for share in shares)
        slowest = max((import_ms(s.size_bytes, s.round_trip_ms, s.megabytes_per_second) for s in shares), default=0.0)
        return slowest + size_bytes / (self._rates.imports.value * BYTES_PER_MS_OF_ONE_MEGABYTE_PER_SECOND)

    def ideal_import_ms(self, peer: PeerView, size_bytes: int, reach: int, at_hand: int) -> float:
        """The least a peer could make of the prompt: it has all up to ``reach``, the rest is computed here."""
        share = LinkShare(peer.node_id, size_bytes, peer.round_trip_ms, peer.megabytes_per_second)
        return self.transfer_ms([share]) + self.here_ms(self._task.target - reach, self._task.target - at_hand)

    def imports(self, at_hand: int, reach: int, shares: Sequence[LinkShare], workers: Iterable[WorkerView]) -> list[Route]:
        """Import up to ``reach``, then compute the rest here or by one of the workers."""
        target = self._task.target
        everything, saved = target - at_hand, reach - at_hand
        effort = self.transfer_ms(shares)
        size = sum(share.size_bytes for share in shares)
        text = f"importing {saved} tokens ({size / 1e6:.1f} MB) from {', '.join(share.node_id for share in shares)}"
        name = f"import from {' '.join(share.node_id for share in shares)}"
        if reach == target:
            return [Route(name, effort, self.here_ms(saved, everything), imports=True, text=text)]
        rest = self.here_ms(target - reach, everything)
        first = Route(f"{name} then compute", effort, self.here_ms(saved, everything), rest, imports=True, text=text)
        routes = [first]
        if self.worth_a_job(target - reach):
            routes += [
                Route(
                    f"{name} then worker {worker.node_id}",
                    effort + self.job_ms(worker, reach),
                    self.here_ms(everything, everything),
                    imports=True,
                    worker=worker.node_id,
                    proven=not self._rates.backoff.is_newcomer(worker.identity_public_key),
                    text=f"{text} and the rest from worker {worker.node_id}",
                )
                for worker in workers
            ]
        return routes

    # --- workers -----------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[WorkerView, ...]:
        """The task's workers that are connected; those with more free memory first, since equal costs keep their order."""
        connected = [worker for worker in self._task.workers if self._task.is_connected(worker.node_id)]
        return tuple(sorted(connected, key=lambda worker: (-worker.free_memory_bytes, worker.node_id)))

    def worth_a_job(self, tokens: int) -> bool:
        return tokens > 0 and (self._task.remote_required or tokens >= self._task.settings.remote_minimum_tokens)

    def job_ms(self, worker: WorkerView, base: int, *, queued: bool = True) -> float:
        """Until a worker has delivered everything from ``base`` to the target; not ``queued``: once it has begun.

        It computes from where its own store ends, not from ``base``, which only saves it sending.
        """
        speed = self._rates.worker_tokens_per_second(worker.node_id, worker.prefill_tokens_per_second)
        transfer = import_ms(self.job_bytes(base), worker.round_trip_ms, worker.megabytes_per_second)
        return worker_ms(self.job_tokens(worker.node_id), worker.queued_tokens if queued else 0, speed, transfer)

    def job_tokens(self, node_id: NodeId) -> int:
        """How many tokens a worker would compute. One that has not said what it holds holds nothing."""
        return self._task.target - self._held_by.get(node_id, 0)

    def job(self, worker: WorkerView, base: int, at_hand: int) -> Route:
        """Have a worker compute from ``base``; ``at_hand``: where computing here would begin."""
        tokens = self._task.target - at_hand
        return Route(
            f"worker {worker.node_id}",
            self.job_ms(worker, base),
            self.here_ms(tokens, tokens),
            worker=worker.node_id,
            proven=not self._rates.backoff.is_newcomer(worker.identity_public_key),
            text=f"worker {worker.node_id} for {self.job_tokens(worker.node_id)} tokens",
        )

    def job_bytes(self, base: int) -> int:
        """Size of the parts that a hit at the target needs and that start at ``base`` or behind it."""
        if not self._job_bytes:
            self._sum_job_bytes()
        return self._job_bytes[bisect.bisect_left(self._job_starts, base)]

    def _sum_job_bytes(self) -> None:
        facts, chain = self._task.facts, self._task.chain
        blocks = {block.block_hash: block for block in chain.blocks}
        sizes: list[int] = []
        for ref in needed_parts(chain, self._task.target, facts.requirement):
            block = blocks[ref.block_hash]
            per_token = facts.part_bytes_per_token[ref.kind]
            self._job_starts.append(block.start)
            sizes.append(per_token if ref.kind is PartKind.STATE else per_token * block.token_count)
        self._job_bytes = [*itertools.accumulate(reversed(sizes), initial=0)][::-1]
