"""What the tests of inference sessions share: a host that checks every effect, and an engine that holds real token
histories and refuses any command that does not go on exactly where its session stands.

The runner is as the real one: commands of one engine session run in order, a cancelled one ends before its turn and tells
the position its session has at that moment (None if it does not exist yet).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kakeya_zmq.blocks import Block, RawPart, needed_parts
from kakeya_zmq.compat import block_hash
from kakeya_zmq.engine import (
    Capture,
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    DecodeFinished,
    Event,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    SegmentComputed,
    SessionReady,
    TokenArray,
    TokenDecoded,
)
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import (
    Ask,
    AskFailed,
    AskId,
    CancelAsk,
    CancelCommand,
    CommandEnded,
    CommandEvent,
    Count,
    HostEvent,
    Note,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Tick,
    Ticket,
)
from kakeya_zmq.protocol.inference import (
    ExplainPrompt,
    InferenceService,
    InferenceSettings,
    PreparationRequest,
    PublishParts,
)
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import IdAllocator, PeerView, PreparationSettings, PreparationTask
from kakeya_zmq.store import BlockStore
from tests.unit.engine_queues import EngineQueues
from tests.unit.preparation_kit import (
    BLOCK,
    FINGERPRINT,
    SEGMENT,
    TENANT_KEY,
    chain_of,
    facts_of,
    is_payload_of,
    kinds_of,
    new_store,
    payload_of,
)
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.messages import (
    Appended,
    AppendTokens,
    CreateSession,
    Generate,
    Generated,
    GetSession,
    PartRef,
    PrefillPolicy,
    PrefillProgress,
    Requirement,
    SessionClosed,
    SessionCreated,
    StopReason,
    Tokens,
)
from wire.messages import (
    CloseSession as CloseRequest,
)

EOS = 1


@dataclass
class Model:
    """What the test knows of a session."""

    session_id: str
    history: list[int] = field(default_factory=list)
    adding: list[int] = field(default_factory=list)
    """Tokens of the append under way."""
    appending: RequestKey | None = None
    decode: Ticket | None = None
    clean: bool = True
    """Nothing failed and nothing was cut off, so everything it holds must have been published."""
    closed: bool = False


class InferenceHost:
    """Carries out the service's effects and holds it to the rules."""

    def __init__(
        self,
        requirement: Requirement,
        *,
        store: BlockStore | None = None,
        settings: InferenceSettings | None = None,
        caches: tuple[str, ...] = (),
        context: int = 4096,
    ) -> None:
        self.requirement = requirement
        self.caches = caches
        self.context = context
        self.now = 0.0
        self.store = store if store is not None else new_store()
        self.ids = IdAllocator(itertools.count(1).__next__)
        self.rates = MeasuredRates()
        self.facts = dataclasses.replace(facts_of(requirement), max_context_tokens=context)
        names = itertools.count(1)
        self.service = InferenceService(
            facts=self.facts,
            store=self.store,
            ids=self.ids,
            random_bytes=lambda count: next(names).to_bytes(count, "big"),
            make_preparation=self.make_preparation,
            make_chain=chain_of,
            hash_block=lambda tokens, parent: block_hash(tokens, FINGERPRINT, parent, TENANT_KEY),
            session_kv_bytes=lambda name: len(self.engines.get(name, ())),
            settings=settings,
        )
        self.numbers = itertools.count(1)
        self.open: dict[RequestKey, Any] = {}
        self.outcomes: dict[RequestKey, Any] = {}
        self.told: dict[RequestKey, list[int]] = {}
        """Tokens streamed for a Generate."""
        self.models: dict[str, Model] = {}
        self.engines: dict[str, list[int]] = {}
        """Engine session → the tokens whose KV it holds."""
        self.queues = EngineQueues()
        self.asks: dict[AskId, Any] = {}
        self.published: set[PartRef] = set()
        self.counts: dict[str, int] = {}
        self.effects: list[Any] = []
        self.next_token = itertools.count(10)
        self.eos_after: int | None = None
        self.failing: set[type] = set()
        self.policy: PrefillPolicy | None = None

    def make_preparation(self, request: PreparationRequest, now: float) -> PromptPreparation:
        tokens = request.tokens
        task = PreparationTask(
            session_id=request.engine_session,
            tokens=tokens,
            live_position=request.live_position,
            chain=chain_of(tokens[:-1]),
            facts=self.facts,
            fingerprint=FINGERPRINT,
            policy=request.options.policy or self.policy or PrefillPolicy.LOCAL_FALLBACK,
            publish=request.options.publish,
            caches=tuple(PeerView(NodeId(name), 1.0, 1000.0) for name in self.caches),
            settings=PreparationSettings(remote_minimum_tokens=8),
        )
        return PromptPreparation(
            task,
            store=self.store if request.options.use_local_cache else None,
            ids=self.ids,
            rates=self.rates,
            hash_tail=lambda parent, start, count: block_hash(
                tokens[start : start + count], FINGERPRINT, parent, TENANT_KEY
            ),
            random_bytes=bytes,
            flights=request.flights,
        )

    # --- effects -----------------------------------------------------------------------------------------------------

    def send(self, event: HostEvent) -> list[Any]:
        self.effects = list(self.service.on(event, self.now))
        for effect in self.effects:
            self.carry_out(effect)
        return self.effects

    def carry_out(self, effect: Any) -> None:
        match effect:
            case SendReply(key=key, body=body):
                self.answered(key, self.open.pop(key), body)
            case SendFailure(key=key, code=code, message=message):
                self.failed(key, self.open.pop(key), code)
                assert message
            case SendProgress(key=key, body=body):
                assert key in self.open, "no progress for a request that has ended"
                if isinstance(body, Tokens):
                    self.told[key].append(int.from_bytes(body.tokens, "little"))
                else:
                    assert isinstance(body, PrefillProgress)
            case RunCommand(ticket=ticket, command=command):
                self.queues.put(ticket, command)
                if isinstance(command, Decode):
                    self.model_of(command.session_id).decode = ticket
            case CancelCommand(ticket=ticket):
                self.queues.cancel(ticket)
            case Ask(ask=ask, body=body):
                self.asks[ask] = body
            case CancelAsk(ask=ask):
                del self.asks[ask]
            case PublishParts(parts=parts):
                assert parts
                self.check_published(parts)
            case Count(name=name, amount=amount):
                self.counts[name] = self.counts.get(name, 0) + amount
            case ExplainPrompt() | Note():
                pass
            case _:
                raise AssertionError(f"unexpected effect {type(effect).__name__}")

    def check_published(self, parts: Any) -> None:
        refs = {part.meta.ref for part in parts}
        decoding = [model for model in self.models.values() if model.decode is not None and not model.closed]
        others = [model for model in self.models.values() if model not in decoding]
        # What another session has, too, may be published on its behalf, also a block of which it has the beginning only.
        shared = {block.parent_hash for model in others for block in self.blocks_of(model)}
        for model in decoding:
            own = {block.block_hash for block in self.blocks_of(model) if block.parent_hash not in shared}
            assert not own & {ref.block_hash for ref in refs}, "nothing is published between first and last token"
        self.published |= refs

    @staticmethod
    def blocks_of(model: Model) -> tuple[Block, ...]:
        return chain_of(np.array(model.history + model.adding, np.int32)).blocks

    def answered(self, key: RequestKey, request: Any, body: Any) -> None:
        self.outcomes[key] = body
        match request:
            case CreateSession():
                assert isinstance(body, SessionCreated)
                self.models[body.session_id] = Model(body.session_id)
            case AppendTokens(session_id=session_id):
                assert isinstance(body, Appended)
                model = self.models[session_id]
                if model.appending == key:
                    model.history += model.adding
                    model.adding, model.appending = [], None
                assert body.history_tokens == len(model.history)
            case Generate(session_id=session_id):
                assert isinstance(body, Generated)
                model = self.models[session_id]
                assert body.token_count == len(self.told[key])
                assert body.history_tokens == len(model.history)
                assert model.history[len(model.history) - body.token_count :] == self.told[key]
            case CloseRequest():
                assert isinstance(body, SessionClosed)
            case _:
                pass

    def failed(self, key: RequestKey, request: Any, code: FailureCode) -> None:
        self.outcomes[key] = code
        model = self.models.get(getattr(request, "session_id", ""))
        if model is not None and model.appending == key:
            model.appending, model.clean = None, False

    def model_of(self, engine_session: str) -> Model:
        return self.models[engine_session]

    # --- what clients do ----------------------------------------------------------------------------------------------

    def ask(self, body: Any, node: str = "client", identity: bytes = b"") -> RequestKey:
        key = RequestKey((bytes(16), next(self.numbers)))
        self.open[key] = body
        self.told[key] = []
        self.send(RequestArrived(key, NodeId(node), (), body, self.now + 60, identity))
        return key

    def create(self, **options: Any) -> str:
        key = self.ask(CreateSession(**options))
        created = self.outcomes[key]
        assert isinstance(created, SessionCreated)
        return created.session_id

    def append(self, session_id: str, tokens: TokenArray) -> RequestKey:
        model = self.models[session_id]
        key = RequestKey((bytes(16), next(self.numbers)))
        self.open[key] = body = AppendTokens(session_id=session_id, tokens=tokens.astype("<i4").tobytes())
        session = self.service._sessions.get(session_id)
        if session is not None and session.operation is None:
            model.adding, model.appending = [int(token) for token in tokens], key
        self.send(RequestArrived(key, NodeId("client"), (), body, self.now + 60))
        return key

    def generate(self, session_id: str, max_tokens: int = 5, **options: Any) -> RequestKey:
        return self.ask(Generate(session_id=session_id, max_tokens=max_tokens, **options))

    def close(self, session_id: str) -> RequestKey:
        model = self.models[session_id]
        # A generation that is cut off ends here, as far as the client is concerned.
        model.closed = True
        model.clean = model.clean and model.decode is None and model.appending is None
        return self.ask(CloseRequest(session_id=session_id))

    def state(self, session_id: str) -> Any:
        return self.outcomes[self.ask(GetSession(session_id=session_id))]

    def cancel(self, key: RequestKey) -> None:
        request = self.open.pop(key)
        self.outcomes[key] = "cancelled"
        model = self.models.get(getattr(request, "session_id", ""))
        if model is not None and model.appending == key:
            # The preparation still works on these tokens until it has ended; the next append replaces them.
            model.appending, model.clean = None, False
        self.send(RequestCancelled(key, "cancelled"))

    def tick(self) -> None:
        self.send(Tick())

    def fail_ask(self, ask: AskId) -> None:
        del self.asks[ask]
        self.send(AskFailed(ask, FailureCode.UNAVAILABLE, "gone"))

    # --- the engine's runner -----------------------------------------------------------------------------------------

    def step(self, choice: int = 0) -> bool:
        """One step of one engine session; False when there is nothing to do."""
        done = self.queues.step(choice, self.run)
        if done is None:
            return False
        name, task, event = done
        if event is not None:
            model = self.models.get(name)
            if isinstance(event, TokenDecoded) and model is not None:
                model.history.append(event.token)
            self.send(CommandEvent(task.ticket, event))
            return True
        model = self.models.get(name)
        if model is not None and model.decode == task.ticket:
            model.decode = None
        held = self.engines.get(name)
        self.send(CommandEnded(task.ticket, task.cancelled, None if held is None else len(held)))
        return True

    def run(self, command: Command) -> Iterator[Event]:
        name = command.session_id
        if isinstance(command, OpenSession):
            assert name not in self.engines
            self.engines[name] = []
            yield SessionReady(name)
            return
        held = self.engines[name]
        if type(command) in self.failing:
            self.model_of(name).clean = False
            if not isinstance(command, Capture):
                held.clear()
            yield CommandFailed(name, "out of memory", len(held))
            return
        match command:
            case CloseSession():
                del self.engines[name]
                yield SessionReady(name)
            case ImportPrefix():
                yield self.do_import(command, held)
            case Prefill():
                yield from self.do_prefill(command, held)
            case Decode():
                yield from self.do_decode(command, held)
            case Capture(start=start):
                assert start <= len(held)
                yield PartsCaptured(name, self.export(held, start, tail=True))

    def coming(self, name: str) -> list[int]:
        model = self.model_of(name)
        return model.history + model.adding

    def do_import(self, command: ImportPrefix, held: list[int]) -> Event:
        tokens = np.array(self.coming(command.session_id)[: command.position], np.int32)
        chain = chain_of(tokens)
        assert len(command.parts) == len(needed_parts(chain, command.position, self.requirement))
        assert all(is_payload_of(part, tokens) for part in command.parts), "KV of other tokens"
        held[:] = tokens.tolist()
        return PrefixImported(command.session_id, command.position, 1.0)

    def do_prefill(self, command: Prefill, held: list[int]) -> Iterator[Event]:
        tokens = command.tokens.tolist()
        assert held + tokens == self.coming(command.session_id)[: len(held) + len(tokens)], "prefill of other tokens"
        while tokens:
            start = len(held)
            count = min(len(tokens), SEGMENT - start % SEGMENT)
            held += tokens[:count]
            tokens = tokens[count:]
            parts = self.export(held, start, tail=not tokens) if command.capture else ()
            yield SegmentComputed(command.session_id, len(held), parts, 1.0)

    def do_decode(self, command: Decode, held: list[int]) -> Iterator[Event]:
        model = self.model_of(command.session_id)
        assert held == model.history[:-1], "the engine must stand before the last token of the history"
        assert command.last_token == model.history[-1]
        limit = min(command.max_tokens, self.context - len(held))
        if limit < 1:
            yield DecodeFinished(command.session_id, StopReason.CONTEXT_FULL, len(held))
            return
        held.append(command.last_token)
        for count in range(1, limit + 1):
            if self.eos_after is not None and count > self.eos_after:
                yield DecodeFinished(command.session_id, StopReason.EOS, len(held))
                return
            token = 2 + next(self.next_token) % 900
            yield TokenDecoded(command.session_id, token)
            if count < limit:
                held.append(token)
        reason = StopReason.MAX_TOKENS if limit == command.max_tokens else StopReason.CONTEXT_FULL
        yield DecodeFinished(command.session_id, reason, len(held))

    def export(self, held: list[int], start: int, *, tail: bool) -> tuple[RawPart, ...]:
        tokens = np.array(held, np.int32)
        spans = [b for b in chain_of(tokens).blocks if b.end > start and (b.token_count == BLOCK or tail)]
        return tuple(
            RawPart(kind, b.start, b.token_count, payload_of(tokens, b.start, b.token_count, kind))
            for b in spans
            for kind in kinds_of(self.requirement)
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Until nothing is under way: peers that were asked are gone, the engine does its work."""
        for _ in range(10_000):
            if self.step():
                continue
            if not self.asks:
                return
            self.fail_ask(next(iter(self.asks)))
        raise AssertionError("it never comes to rest")

    def finish(self) -> None:
        """Settle, close every session, settle: nothing may be left."""
        self.settle()
        assert not self.open, "every request has ended"
        for session_id in list(self.service._sessions):
            self.close(session_id)
        self.settle()
        assert not self.service.busy
        assert (self.service.session_count, self.service._appends._owners, self.service._generations._sessions) == (
            0,
            {},
            {},
        )
        assert (self.engines, self.open, self.asks) == ({}, {}, {})
        assert self.service.deadline() is None
        assert self.store.stats().leases == 0
        # What a session found prepared by one that does not publish, or that failed, is not its own to publish.
        others = {block.block_hash for model in self.models.values() if not model.clean for block in self.blocks_of(model)}
        for model in self.models.values():
            if model.clean:
                blocks = chain_of(np.array(model.history[:-1], np.int32)).blocks
                for block in blocks:
                    ref = PartRef(block_hash=block.block_hash, kind=kinds_of(self.requirement)[0])
                    published = block.token_count < BLOCK or block.block_hash in others or ref in self.published
                    assert published, "what a session made is published"
