"""What the tests of the worker's job queue share: a host that checks every effect the service makes, with an engine runner
that keeps the rules of kakeya_zmq.engine_runner (commands of one session in order, every ticket ends once)."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kakeya_zmq.blocks import Part
from kakeya_zmq.engine import (
    CloseSession,
    Command,
    CommandFailed,
    Event,
    OpenSession,
    SegmentComputed,
    SessionReady,
    TokenArray,
)
from kakeya_zmq.protocol.effects import (
    AddCredit,
    BindSender,
    CancelCommand,
    CloseLane,
    CommandEnded,
    CommandEvent,
    Count,
    Effect,
    FeedSender,
    HostEvent,
    LaneFinished,
    LaneId,
    LaneOpened,
    Note,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Tick,
    UpdateArrived,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.work import WorkService, WorkSettings
from kakeya_zmq.protocol.work_job import LANE_GRACE_S
from kakeya_zmq.store import BlockStore
from tests.unit.engine_queues import EngineQueues
from tests.unit.preparation_kit import (
    FINGERPRINT,
    JOB_KEYS,
    TENANT_KEY,
    FakeEngine,
    binding_of,
    chain_of,
    facts_of,
    key_of,
    new_store,
    part_of,
)
from wire import limits
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.job_seal import PREFIX_BYTES, JobBinding, JobKeys
from wire.messages import (
    CipherSuite,
    Credit,
    JobAccepted,
    JobProgress,
    JobResult,
    PartKind,
    PartRef,
    Requirement,
    SubmitJob,
    TransferDone,
    TransferGrant,
)

GRANT = TransferGrant(
    transfer_id=bytes(16),
    port=1,
    token="0" * 32,
    key=bytes(32),
    suite=CipherSuite.SECRETBOX,
    chunk_bytes=limits.CHUNK_BYTES_MIN,
)


def submission(
    tokens: TokenArray,
    *,
    job_id: int = 1,
    have: int = 0,
    checkpoints: int = 0,
    chunk_bytes: int = limits.CHUNK_BYTES_MIN,
    credit_bytes: int = limits.CHUNK_BYTES_MIN,
    suites: tuple[CipherSuite, ...] = (CipherSuite.SECRETBOX,),
    fingerprint: bytes = FINGERPRINT,
    node: str = "asker",
    keys: JobKeys = JOB_KEYS,
) -> SubmitJob:
    binding = JobBinding(fingerprint, job_id.to_bytes(16, "big"), key_of(node), key_of("worker"))
    return SubmitJob(
        job_id=binding.job_id,
        fingerprint=fingerprint,
        prompt=keys.seal(binding, secrets.token_bytes(PREFIX_BYTES), tokens.astype("<i4").tobytes()),
        have_tokens=have,
        suites=suites,
        chunk_bytes_max=chunk_bytes,
        credit_bytes=credit_bytes,
        checkpoint_tokens=checkpoints,
    )


@dataclass
class Lane:
    bind: BindSender
    key: RequestKey
    opened: bool = False
    closed: bool | None = None
    """How it was closed: well or not."""
    refs: list[PartRef] = field(default_factory=list)
    final: bool = False


@dataclass
class Request:
    body: SubmitJob
    tokens: TokenArray
    node: str
    done: int = -1
    """JobProgress so far."""
    granted: int = 0
    asker_done: bool = False
    outcome: JobResult | FailureCode | None = None


class WorkHost:
    """Carries out the service's effects and holds it to the rules."""

    def __init__(
        self, requirement: Requirement, *, store: BlockStore | None = None, settings: WorkSettings | None = None
    ) -> None:
        self.requirement = requirement
        self.now = 0.0
        self.store = store if store is not None else new_store()
        self.service = WorkService(
            facts=facts_of(requirement),
            tenant_key=TENANT_KEY,
            identity_public_key=key_of("worker"),
            store=self.store,
            ids=IdAllocator(itertools.count(1).__next__),
            has_aes=False,
            settings=settings,
        )
        self.numbers = itertools.count(1)
        self.requests: dict[RequestKey, Request] = {}
        self.ended: dict[RequestKey, Request] = {}
        self.lanes: dict[LaneId, Lane] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.queues = EngineQueues()
        self.import_fails = False
        self.prefill_fails_at: int | None = None
        self.not_encoded = 0
        """Parts of each segment that the codec refuses."""
        self.notes: list[Note] = []
        self.refusals: list[str] = []
        self.failures: list[str] = []
        self.counts: dict[str, int] = {}
        self.sent: list[Part] = []
        self.effects: list[Effect] = []
        """Of the last event."""

    # --- effects -----------------------------------------------------------------------------------------------------

    def send(self, event: HostEvent) -> list[Effect]:
        self.effects = self.service.on(event, self.now)
        self.carry_out(self.effects)
        return self.effects

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendReply(key=key, body=body):
                    request = self.end(key)
                    assert isinstance(body, JobResult)
                    assert request.asker_done, "a reply only when the asker has said that it has everything"
                    assert body.tokens_computed + body.tokens_reused == len(request.tokens) - 1
                    request.outcome = body
                case SendFailure(key=key, code=code, message=message):
                    self.end(key).outcome = code
                    assert message
                    self.failures.append(message)
                case SendProgress(key=key, body=progress):
                    self.progress(self.requests[key], progress)
                case BindSender() | FeedSender() | AddCredit() | CloseLane():
                    self.lane_effect(effect)
                case RunCommand(ticket=ticket, command=command):
                    self.queues.put(ticket, command)
                case CancelCommand(ticket=ticket):
                    self.queues.cancel(ticket)
                case Count(name=name, amount=amount):
                    self.counts[name] = self.counts.get(name, 0) + amount
                case Note():
                    self.notes.append(effect)
                case Refuse(reason=reason):
                    self.refusals.append(reason)
                case _:
                    raise AssertionError(f"unexpected effect {type(effect).__name__}")

    def end(self, key: RequestKey) -> Request:
        assert key in self.requests, "a request ends once"
        self.ended[key] = self.requests.pop(key)
        return self.ended[key]

    def progress(self, request: Request, body: object) -> None:
        match body:
            case JobProgress(tokens_done=done, tokens_total=total, tokens_reused=reused):
                assert request.done <= done <= total == len(request.tokens) - 1, "progress never goes back"
                assert reused <= done
                request.done = done
            case TransferGrant():
                request.granted += 1
                assert request.granted == 1
            case JobAccepted(proof=proof):
                assert proof == JOB_KEYS.proof(binding_of(request.body, "worker", key_of(request.node)), request.body.prompt)
            case _:
                raise AssertionError(f"unexpected progress {type(body).__name__}")

    def lane_effect(self, effect: BindSender | FeedSender | AddCredit | CloseLane) -> None:
        if isinstance(effect, BindSender):
            assert effect.lane not in self.lanes
            assert limits.CHUNK_BYTES_MIN <= effect.chunk_bytes <= effect.credit_bytes
            job = next(job for job in self.service._table.active() if job.lane == effect.lane)
            self.lanes[effect.lane] = Lane(effect, job.key)
            return
        lane = self.lanes[effect.lane]
        match effect:
            case FeedSender(parts=parts, final=final):
                assert lane.opened
                assert lane.closed is None
                assert not lane.final, "the final feed happens once"
                request = self.requests[lane.key]
                for part in parts:
                    assert part == part_of(request.tokens, chain_of(request.tokens[:-1]), part.meta.ref)
                    lane.refs.append(part.meta.ref)
                    self.sent.append(part)
                lane.final = final
                if final:
                    wanted = {*self.wanted(request), *self.on_the_way(request)}
                    assert sorted(map(str, lane.refs)) == sorted(map(str, wanted)), "all of them, each once"
            case AddCredit():
                assert lane.closed is None
            case CloseLane(ok=ok):
                assert lane.closed is None, "a lane is closed once"
                lane.closed = ok

    def wanted(self, request: Request) -> list[PartRef]:
        """What the asker lacks, worked out without the code under test."""
        target, requirement = len(request.tokens) - 1, self.requirement
        refs: list[PartRef] = []
        for block in chain_of(request.tokens[:-1]).blocks:
            if block.end <= request.body.have_tokens:
                continue
            kinds = [requirement.full, False, requirement.state and block.end == target]
            if requirement.window_tokens:
                kinds[1] = block.end > target - requirement.window_tokens or block.start < requirement.sink_tokens
            refs += [PartRef(block_hash=block.block_hash, kind=PartKind(k)) for k, yes in enumerate(kinds) if yes]
        return refs

    def on_the_way(self, request: Request) -> list[PartRef]:
        """What its checkpoints are made of, of a job that computes everything; without the code under test."""
        target, requirement, every = len(request.tokens) - 1, self.requirement, request.body.checkpoint_tokens
        refs: list[PartRef] = []
        for end in range(every, target, every) if every else ():
            for block in chain_of(request.tokens[:-1]).blocks:
                if request.body.have_tokens < block.end <= end:
                    if requirement.window_tokens and block.end > end - requirement.window_tokens:
                        refs.append(PartRef(block_hash=block.block_hash, kind=PartKind.WINDOW))
                    if requirement.state and block.end == end:
                        refs.append(PartRef(block_hash=block.block_hash, kind=PartKind.STATE))
        return refs

    # --- what peers do ----------------------------------------------------------------------------------------------

    def submit(self, tokens: TokenArray, *, node: str = "asker", **options: object) -> RequestKey:
        key = RequestKey((bytes(16), next(self.numbers)))
        body = submission(tokens, node=node, **options)  # type: ignore[arg-type]
        self.requests[key] = Request(body, tokens, node)
        self.send(RequestArrived(key, NodeId(node), (), body, self.now + 60, key_of(node)))
        return key

    def cancel(self, key: RequestKey) -> None:
        self.ended[key] = self.requests.pop(key)
        self.send(RequestCancelled(key, "cancelled"))

    def done(self, key: RequestKey, complete: bool = True) -> None:
        self.requests[key].asker_done |= complete
        self.send(UpdateArrived(key, TransferDone(complete=complete)))

    def credit(self, key: RequestKey) -> None:
        self.send(UpdateArrived(key, Credit(credit_bytes=1)))

    # --- lanes ---------------------------------------------------------------------------------------------------------

    def open_lane(self, lane: LaneId) -> None:
        if not self.lanes[lane].opened and self.lanes[lane].closed is None:
            self.lanes[lane].opened = True
            self.send(LaneOpened(lane, GRANT))

    def finish_lane(self, lane: LaneId) -> None:
        state = self.lanes.pop(lane)
        self.send(LaneFinished(lane, state.closed is True and state.final, "it ended", 7))

    # --- the engine's runner -----------------------------------------------------------------------------------------

    def step(self, choice: int = 0) -> bool:
        """One step of one engine session; False when there is nothing to do."""
        done = self.queues.step(choice, self.run)
        if done is None:
            return False
        name, task, event = done
        if event is not None:
            self.send(CommandEvent(task.ticket, event))
            return True
        engine = self.engines.get(name)
        self.send(CommandEnded(task.ticket, task.cancelled, engine.position if engine else None))
        return True

    def run(self, command: Command) -> Iterator[Event]:
        name = command.session_id
        match command:
            case OpenSession():
                assert not self.engines, "a job starts when the engine session of the last one has been closed"
                running = self.service._table.running
                history = running.tokens if running is not None and running.engine_session == name else None
                self.engines[name] = FakeEngine(history, self.requirement, 0)  # type: ignore[arg-type]
                yield SessionReady(name)
            case CloseSession():
                del self.engines[name]
                yield SessionReady(name)
            case _:
                engine = self.engines.get(name)
                if engine is None or engine.history is None:
                    yield CommandFailed(name, "no such session", 0)
                    return
                engine.import_fails, engine.prefill_fails_at = self.import_fails, self.prefill_fails_at
                for event in engine.run(command):
                    if isinstance(event, SegmentComputed) and (lost := self.not_encoded):
                        event = replace(event, parts=event.parts[lost:], parts_not_encoded=lost)
                    yield event

    # --- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let everything that was begun come to its end with an asker that plays along."""
        for _ in range(10_000):
            if self.step():
                self.now += 0.01
                continue
            for lane in list(self.lanes):
                self.open_lane(lane)
                state = self.lanes[lane]
                if state.final and state.closed is None:
                    self.done(state.key)
                if state.closed is not None:
                    self.finish_lane(lane)
            if self.service._table.broken():
                self.now += LANE_GRACE_S
                self.send(Tick())
            elif not self.lanes and not any(self.queues.values()):
                break
        self.check_drained()

    def check_drained(self) -> None:
        assert self.service.idle
        assert (self.requests, self.lanes, self.engines) == ({}, {}, {})
        assert self.store.stats().bytes_reserved == 0
        assert (self.service.queued_jobs, self.service.running_jobs, self.service.queued_tokens) == (0, 0, 0)
