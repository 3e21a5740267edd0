"""The primary: serves inference sessions and does every decode step."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from daemons.engine_host import make_runner
from daemons.node import Node
from daemons.node_keys import load_keys
from daemons.primary_peers import PrimaryPeers
from daemons.supervision import Supervisor
from kakeya_zmq.blocks import Chain, Part
from kakeya_zmq.codecs.probe import CodecProbe, value_bytes_of
from kakeya_zmq.compat import block_hash, chain_hashes, tenant_key_id
from kakeya_zmq.config import Settings
from kakeya_zmq.decode_worker.engine import DecodeWorkerEngine
from kakeya_zmq.engine import ModelFacts, TokenArray
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.model.reserve import give_back_reserve
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.inference import (
    ExplainPrompt,
    InferenceService,
    InferenceSettings,
    PreparationRequest,
    PublishParts,
)
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import (
    PreparationSettings,
    PreparationTask,
)
from kakeya_zmq.protocol.publish import Publisher, PublishSettings
from kakeya_zmq.telemetry import Value, explanation_line
from wire.bulk import own_suites
from wire.job_seal import JobKeys
from wire.keys import load_or_create_tenant_key
from wire.limits import GIB
from wire.messages import Cut, PrefillPolicy, ValueBytes

DRAIN_SECONDS = 10.0
"""How long the step that runs may take to end."""
POLICIES = {
    "local-fallback": PrefillPolicy.LOCAL_FALLBACK,
    "remote-required": PrefillPolicy.REMOTE_REQUIRED,
    "local-only": PrefillPolicy.LOCAL_ONLY,
}


class Primary:
    """A :class:`daemons.run.Daemon`.

    Raises:
        KakeyaError: keys, addresses or the model folder are not usable.
    """

    def __init__(self, reactor: Reactor, settings: Settings) -> None:
        self._reactor = reactor
        self._settings = settings
        self._tenant_key = load_or_create_tenant_key(Path(settings.tenant_key_file))
        self._tenant_key_id = tenant_key_id(self._tenant_key)
        self._job_keys = JobKeys(self._tenant_key)
        self.node = Node(reactor, settings, load_keys(settings), roles=("primary",))
        self._rates = MeasuredRates()
        self._rates.local.default = settings.local_prefill_tps
        self._facts: ModelFacts | None = None
        self._fingerprint = b""
        """The model's, once it is loaded."""
        self._peers: PrimaryPeers | None = None
        self._inference: InferenceService | None = None
        self._publisher: Publisher | None = None
        self._ready: Callable[[dict[str, object]], None] = lambda facts: None
        self._runner = make_runner(
            reactor, settings, self.node.dispatcher, on_ready=self._engine_ready, on_failed=lambda error: self._fail(error)
        )
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._supervisor = Supervisor(
            reactor,
            settings,
            self.node,
            self._runner,
            work=self,
            fail=lambda error: self._fail(error),
            give_back=give_back_reserve,
            trouble=self._model_trouble,
        )

    def _model_trouble(self) -> str:
        child = self._runner.control
        given_up = isinstance(child, DecodeWorkerEngine) and child.given_up
        return "the decode worker was lost too often" if given_up else ""

    def sessions(self) -> int:
        return self._inference.session_count if self._inference is not None else 0

    def decoding(self) -> bool:
        """Whether a session is between its first and its last token."""
        return self._inference is not None and self._inference.decoding

    def begin(self, ready: Callable[[dict[str, object]], None], fail: Callable[[BaseException], None]) -> None:
        self._ready = ready
        self._fail = fail
        self._runner.start()

    def drain(self, reason: str) -> None:
        self.node.drain(reason)

    def drained(self) -> bool:
        """Whether nothing is under way and everything new is published."""
        if self._inference is None or self._publisher is None:
            return True
        self.node.dispatcher.apply(self._inference, self._inference.flush(self._reactor.clock()))
        published = self._inference.unpublished == 0 and self._publisher.waiting == 0 and self._publisher.idle
        return self.node.quiet and published

    def end(self, reason: str) -> None:
        self._supervisor.close()
        self.node.close(reason)
        self._runner.stop(0.0 if self._supervisor.stalled else DRAIN_SECONDS)

    # --- wiring ------------------------------------------------------------------------------------------------------

    def _engine_ready(self, facts: ModelFacts, tokens_per_second: float) -> None:
        node = self.node
        self._facts = facts
        node.facts = facts
        node.tenant_key_id = self._tenant_key_id
        node.security.entitlement.access.learn_tuple(asdict(facts.compatibility))
        self._fingerprint = facts.compatibility.fingerprint()
        self._rates.local.assume(tokens_per_second)
        compatibility = facts.compatibility
        self._rates.codec_rates = CodecProbe(compatibility.kv_dtype, compatibility.cache_format_version)
        self._publisher = Publisher(self._publish_settings(), node.ids, node.counters.set, self._rates)
        took_at = self._publisher.took_at
        peers = PrimaryPeers(node, self._settings, facts, self._tenant_key_id, rates=self._rates, took_at=took_at)
        self._peers = peers
        self._rates.same_host = peers.same_host
        node.membership.gone += [self._rates.forget, peers.forget]
        node.membership.routed.append(self._rates.use_route)
        node.telemetry.link_megabytes_per_second = peers.measured_megabytes_per_second
        self._inference = InferenceService(
            facts=facts,
            store=node.store,
            ids=node.ids,
            random_bytes=secrets.token_bytes,
            make_preparation=self._make_preparation,
            make_chain=self._make_chain,
            hash_block=self._hash_block,
            session_kv_bytes=self._runner.kv_bytes,
            settings=InferenceSettings(
                capacity=self._settings.capacity,
                session_idle_s=self._settings.session_idle_s,
                sharing=self._settings.enable_prefill_cache,
            ),
        )
        node.emptying.also.append(self._let_go)
        node.dispatcher.add(self._publisher, extra=self._carry_out)
        node.dispatcher.add(self._inference, handles=self._inference.handles, extra=self._carry_out)
        node.sections.append(self._section)
        child = self._runner.control
        if isinstance(child, DecodeWorkerEngine):
            node.sections.append(lambda: ("decode_worker", asdict(child.figures())))
        node.open()
        reached = {"address": str(node.address), "bus_port": node.endpoints.bus_port}
        self._ready({**reached, "model_id": facts.compatibility.model_id})

    def _let_go(self) -> None:
        """The store was emptied, as what was in it may be wrong: what came of it goes nowhere any more."""
        assert self._publisher is not None
        assert self._inference is not None
        self._inference.isolate()
        self.node.dispatcher.apply(self._publisher, self._publisher.close())

    def _carry_out(self, effect: object) -> bool:
        match effect:
            case ExplainPrompt(explanation=explanation):
                self.node.note("info", explanation_line(explanation))
            case PublishParts(parts=parts, cuts=cuts):
                self._publish(parts, cuts)
            case _:
                return self.node.carry_out(effect)
        return True

    def _publish(self, parts: tuple[Part, ...], cuts: tuple[Cut, ...]) -> None:
        assert self._publisher is not None
        assert self._peers is not None
        now = self._reactor.clock()
        effects = self._publisher.publish(parts, self._fingerprint, self._peers.publish_targets(now), now, cuts)
        self.node.dispatcher.apply(self._publisher, effects)

    def _section(self) -> tuple[str, dict[str, Value]]:
        assert self._inference is not None
        assert self._publisher is not None
        assert self._facts is not None
        rates = self._rates
        return "primary", {
            "model_id": self._facts.compatibility.model_id,
            "fingerprint": self._fingerprint.hex()[:16],
            "policy": self._settings.prefill_policy if self._settings.enable_prefill_cache else "cache off",
            "sessions": self._inference.session_count,
            "decoding": self._inference.decoding,
            "publish_queue": self._inference.unpublished + self._publisher.waiting + int(not self._publisher.idle),
            "local_prefill_tokens_per_second": round(rates.local.measured or 0.0, 1),
            "engine_failures": self._runner.failures,
        }

    # --- preparations ------------------------------------------------------------------------------------------------

    def _make_chain(self, tokens: TokenArray) -> Chain:
        assert self._facts is not None
        return chain_hashes(
            tokens,
            self._fingerprint,
            self._tenant_key,
            self._facts.requirement.block_tokens,
        )

    def _hash_block(self, tokens: TokenArray, parent_hash: bytes) -> bytes:
        return block_hash(tokens, self._fingerprint, parent_hash, self._tenant_key)

    def _make_preparation(self, request: PreparationRequest, now: float) -> PromptPreparation:
        assert self._facts is not None
        assert self._peers is not None
        options, facts, peers = request.options, self._facts, self._peers
        fingerprint = self._fingerprint
        excluded = set(options.exclude_nodes)
        cards = peers.live_cards(excluded, now)
        workers, hints = peers.workers(cards)
        workers += peers.workers_without_card({card.node_id for card in cards} | excluded)
        policy = options.policy if options.policy is not None else POLICIES[self._settings.prefill_policy]
        tokens = request.tokens

        def hash_tail(parent_hash: bytes, start: int, count: int) -> bytes:
            return block_hash(tokens[start : start + count], fingerprint, parent_hash, self._tenant_key)

        task = PreparationTask(
            session_id=request.engine_session,
            tokens=tokens,
            live_position=request.live_position,
            chain=self._make_chain(tokens[:-1]),
            facts=facts,
            fingerprint=fingerprint,
            policy=policy,
            publish=options.publish,
            caches=peers.caches(cards, excluded, now),
            workers=workers,
            settings=self._preparation_settings(),
            hints=hints,
            no_worker="" if workers else peers.no_worker(excluded, now),
            is_connected=lambda node_id: self.node.find_asked(node_id) is not None,
            may_keep=self._may_keep(),
            job_keys=self._job_keys,
            identity_public_key=self.node.local.identity.public_key,
        )
        return PromptPreparation(
            task,
            store=self.node.store if options.use_local_cache else None,
            ids=self.node.ids,
            rates=self._rates,
            random_bytes=secrets.token_bytes,
            hash_tail=hash_tail,
            set_value=self.node.counters.set,
            flights=request.flights,
        )

    def _may_keep(self) -> Callable[[], bool]:
        """Until the store is emptied: what is under way then rests on what was in it."""
        emptying = self.node.emptying
        count = emptying.count
        return lambda: emptying.count == count

    def _preparation_settings(self) -> PreparationSettings:
        settings = self._settings
        return PreparationSettings(
            lookup_timeout_s=settings.cache_lookup_timeout_s,
            fetch_timeout_s=settings.cache_fetch_timeout_s,
            worker_timeout_s=settings.prefill_worker_timeout_s,
            remote_minimum_tokens=settings.remote_prefill_min_tokens,
            max_import_bytes=int(settings.cache_max_import_gb * GIB),
            minimum_savings_ratio=settings.prefill_min_savings_ratio,
            compute_penalty_ms=settings.primary_prefill_penalty_ms,
            suites=own_suites(has_aes=self.node.has_aes),
            link_compression=settings.link_compression,
            value_bytes=self._value_bytes(),
            import_grid_tokens=self._import_grid_tokens(),
            segment_tokens=settings.prefill_compute_chunk_tokens,
        )

    def _import_grid_tokens(self) -> int:
        """Where prefixes may be cut; 0: at any block. In float32 no cut has changed a token yet (docs/decisions/0010)."""
        assert self._facts is not None
        choice = self._settings.import_grid
        exact = choice == "off" or (choice == "auto" and self._facts.compatibility.kv_dtype == "float32")
        return 0 if exact else self._settings.prefill_compute_chunk_tokens

    def _publish_settings(self) -> PublishSettings:
        return PublishSettings(
            replication_factor=self._settings.cache_replication_factor,
            suites=own_suites(has_aes=self.node.has_aes),
            link_compression=self._settings.link_compression,
            value_bytes=self._value_bytes(),
        )

    def _value_bytes(self) -> ValueBytes:
        assert self._facts is not None
        compatibility = self._facts.compatibility
        return value_bytes_of(compatibility.kv_dtype, compatibility.cache_format_version)
