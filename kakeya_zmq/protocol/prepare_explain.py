"""What is said of a preparation when it has ended: where the KV came from, why it was not better, what is counted."""

from __future__ import annotations

from kakeya_zmq.protocol.effects import Count, Effect
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.prepare_engine import EngineSession
from kakeya_zmq.protocol.prepare_values import PreparationTask
from wire.messages import Explanation, SourceKind


def over_limit(tokens: int) -> str:
    return f"only the first {tokens} tokens fit into the import limit"


def why_no_job(task: PreparationTask, holdings: Holdings) -> str:
    """Why no worker is asked for anything; empty when they are."""
    importable = holdings.importable.tokens
    if importable < task.target:
        return over_limit(importable)
    return "" if task.workers else task.no_worker


def shortfall(task: PreparationTask, holdings: Holdings, there: int) -> str:
    """Why a prompt that must not be computed here is not ready; ``there``: tokens whose KV can be had."""
    text = f"remote prefill is required, and the fleet delivered {there} of {task.target} tokens"
    return f"{text}: {'; '.join(_causes_of_shortfall(task, holdings))}"


def _causes_of_shortfall(task: PreparationTask, holdings: Holdings) -> list[str]:
    if holdings.importable.tokens < task.target:
        return [over_limit(holdings.importable.tokens)]
    account = holdings.account
    causes = [account.last_failure] if account.last_failure else []
    if not task.workers:
        causes += [*task.hints, task.no_worker]
        causes += [] if task.caches else ["no cache is known"]
    return causes or account.reasons[-1:] or ["nothing that could help is known"]


def explain(task: PreparationTask, holdings: Holdings, engine: EngineSession, elapsed_s: float) -> Explanation:
    """The explanation that the client gets."""
    account, reach = holdings.account, engine.imported
    diverged_at, known_to = holdings.diverged_at, holdings.known_to
    if known_to <= task.live_position:
        diverged_at = None
    elif diverged_at is not None:
        account.reason(f"diverged at token {diverged_at} from everything cached that begins like it")
    elif known_to < task.target:
        account.reason(f"nothing cached is known beyond token {known_to}")
    used = holdings.needed(reach) if reach is not None else ()
    account.explain_unused(used)
    return Explanation(
        prompt_tokens=len(task.tokens),
        sources=account.sources(engine.live, reach.blocks if reach is not None else (), used, engine.position),
        reasons=tuple(account.reasons),
        elapsed_ms=max(0.0, elapsed_s * 1000.0),
        decisions=tuple(account.decisions),
        diverged_at=diverged_at,
    )


def count_reuse(task: PreparationTask, holdings: Holdings, engine: EngineSession) -> list[Effect]:
    """What a prompt that is ready counts as: a hit, a miss, or neither."""
    reach = engine.imported
    if reach is None:
        # The session's own KV is no hit of a cache; a prompt that had to begin at nothing is a miss.
        return [Count("misses")] if engine.live == 0 and task.target > 0 else []
    remote = holdings.account.origin_kinds(holdings.needed(reach)) & {SourceKind.REMOTE_CACHE, SourceKind.WORKER}
    return [Count("remote_hits" if remote else "local_hits"), Count("tokens_reused", reach.position)]
