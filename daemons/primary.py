"""The primary: serves inference sessions and does every decode step."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from daemons.engine_host import make_runner
from daemons.node import Node
from daemons.node_keys import load_keys
from daemons.supervision import Supervisor
from kakeya_zmq.blocks import Chain, Part
from kakeya_zmq.codecs.probe import CodecProbe, value_bytes_of
from kakeya_zmq.compat import TENANT_KEY_ID, block_hash, chain_hashes, tenant_key_id
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
    PeerView,
    PreparationSettings,
    PreparationTask,
    WorkerView,
)
from kakeya_zmq.protocol.publish import Publisher, PublishSettings, replica_candidates
from kakeya_zmq.roster import NOT_ASKED
from kakeya_zmq.telemetry import Value, explanation_line
from wire.bulk import own_suites
from wire.cards import Card
from wire.ids import NodeId
from wire.job_seal import JobKeys
from wire.keys import load_or_create_tenant_key
from wire.limits import GIB
from wire.messages import CreateSession, Cut, PrefillPolicy, ValueBytes

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
        self._passed_over: set[str] = set()
        """Nodes that offer KV or work and are not asked, since the roster does not list them with this tenant."""
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
        self._rates.same_host = self._same_host
        node.membership.gone += [self._rates.forget, self._passed_over.discard]
        node.membership.routed.append(self._rates.use_route)
        node.telemetry.link_megabytes_per_second = self._measured_megabytes_per_second
        self._publisher = Publisher(self._publish_settings(), node.ids, node.counters.set, self._rates)
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
        assert self._facts is not None
        effects = self._publisher.publish(parts, self._fingerprint, self._publish_targets(), self._reactor.clock(), cuts)
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
        options = request.options
        facts = self._facts
        fingerprint = self._fingerprint
        cards = self._live_cards(options, now)
        workers, hints = self._workers(cards)
        workers += self._workers_without_card({card.node_id for card in cards} | set(options.exclude_nodes))
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
            caches=self._caches(cards, set(options.exclude_nodes), now),
            workers=workers,
            settings=self._preparation_settings(),
            hints=hints,
            no_worker="" if workers else self._no_worker(set(options.exclude_nodes), now),
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

    def _live_cards(self, options: CreateSession, now: float) -> list[Card]:
        excluded = set(options.exclude_nodes)
        return [
            card
            for card in self.node.directory.peers(now)
            if card.node_id not in excluded and self._usable(card.node_id, offers=self._offers(card))
        ]

    def _usable(self, node_id: str, *, offers: bool) -> bool:
        """Whether a node is connected and may be asked. One that offers what this primary needs and may not is told of."""
        if self.node.peers.find(node_id) is None:
            return False
        if self.node.security.entitlement.access.may_be_asked(node_id):
            self._passed_over.discard(node_id)
            return True
        if offers and node_id not in self._passed_over:
            self._passed_over.add(node_id)
            self.node.security.count_refusal(NOT_ASKED, subject=node_id)
            self.node.note("warning", f"{node_id}: {NOT_ASKED}")
        return False

    def _offers(self, card: Card) -> bool:
        """Whether a card offers work or KV of this primary's own namespace."""
        works = card.worker is not None and card.worker.fingerprint == self._fingerprint
        return works or (card.cache is not None and any(held.fingerprint == self._fingerprint for held in card.cache.held))

    def _static(self, role: str) -> list[str]:
        """Nodes that the settings name for a role and that may be asked."""
        return [name for name in self.node.peers.in_role(role) if self._usable(name, offers=True)]

    def _round_trip_ms(self, node_id: str) -> float:
        client = self.node.peers.find(node_id)
        return (client.round_trip_ms or 0.0) if client is not None else 0.0

    def _identity_of(self, node_id: str) -> bytes:
        """The key that a connected node has proven in its session."""
        client = self.node.peers.find(node_id)
        assert client is not None, "only connected nodes are looked at"
        assert client.peer is not None, "and their sessions are up"
        return client.peer.identity_public_key

    def _link_megabytes_per_second(self, node_id: str) -> float:
        """What was measured of the link from a node, else what the settings assume."""
        return self._rates.link_megabytes_per_second(NodeId(node_id)) or self._settings.cache_link_mbps / 8

    def _measured_megabytes_per_second(self, node_id: str) -> float:
        return self._rates.link_megabytes_per_second(NodeId(node_id)) or 0.0

    def _same_host(self, node_id: NodeId) -> bool:
        client = self.node.peers.find(node_id)
        return client is not None and _is_loopback(client.host)

    def _caches(self, cards: list[Card], excluded: set[str], now: float) -> tuple[PeerView, ...]:
        """Nodes that hold something, as their cards tell or they said themselves since, and those of --cache-peer, whatever
        their cards tell."""
        names = [
            card.node_id
            for card in cards
            if card.cache is not None and (card.cache.entry_count > 0 or self._took_since_card(NodeId(card.node_id), now))
        ]
        names += [name for name in self._static("cache") if name not in excluded and name not in names]
        return tuple(
            PeerView(
                node_id=NodeId(name),
                round_trip_ms=self._round_trip_ms(name),
                megabytes_per_second=self._link_megabytes_per_second(name),
            )
            for name in names
        )

    def _took_since_card(self, node_id: NodeId, now: float) -> bool:
        """Whether a node has taken parts of ours since its card, which says it holds none, was made."""
        assert self._publisher is not None
        took_at, age_ms = self._publisher.took_at(node_id), self.node.directory.age_ms(node_id, now)
        return took_at is not None and age_ms is not None and took_at > now - age_ms / 1000.0

    def _workers_without_card(self, known: set[str]) -> tuple[WorkerView, ...]:
        """Nodes of --worker whose card has not come: they are asked, and refuse a job they cannot do."""
        return tuple(
            WorkerView(
                node_id=NodeId(name),
                identity_public_key=self._identity_of(name),
                prefill_tokens_per_second=self._settings.worker_prefill_tps,
                queued_tokens=0,
                round_trip_ms=self._round_trip_ms(name),
                megabytes_per_second=self._link_megabytes_per_second(name),
                free_memory_bytes=0,
            )
            for name in self._static("worker")
            if name not in known
        )

    def _workers(self, cards: list[Card]) -> tuple[tuple[WorkerView, ...], tuple[str, ...]]:
        """The workers that can be used, and why others cannot."""
        views: list[WorkerView] = []
        hints: list[str] = []
        for card in cards:
            worker = card.worker
            if worker is None:
                continue
            mismatch = self._mismatch(card)
            if mismatch:
                hints.append(mismatch)
            if not worker.accepts_jobs:
                continue
            if mismatch:
                self.node.note("warning", mismatch)
                continue
            views.append(
                WorkerView(
                    node_id=NodeId(card.node_id),
                    identity_public_key=self._identity_of(card.node_id),
                    prefill_tokens_per_second=worker.prefill_tokens_per_second or self._settings.worker_prefill_tps,
                    queued_tokens=worker.queued_tokens,
                    round_trip_ms=self._round_trip_ms(card.node_id),
                    megabytes_per_second=self._link_megabytes_per_second(card.node_id),
                    free_memory_bytes=worker.ram_bytes_free,
                )
            )
        return tuple(views), tuple(hints)

    def _no_worker(self, excluded: set[str], now: float) -> str:
        """Why there is no worker to ask, in one line."""
        known = {card.node_id for card in self.node.directory.peers(now) if card.worker is not None}
        if not known:
            static = bool(self._settings.worker)
            return "the node of --worker is not connected" if static else "no worker is known"
        if known <= excluded:
            return "all workers are excluded"
        connected = {name for name in known - excluded if self.node.peers.find(name) is not None}
        if not connected:
            return "no worker is connected"
        if not any(self.node.find_asked(name) for name in connected):
            return "the roster lists no worker that is connected with this tenant"
        return "no worker that is connected can be used"

    def _mismatch(self, card: Card) -> str:
        """Why a worker cannot be used, in one line; empty when it can, or when its card offers no work."""
        assert self._facts is not None
        assert card.worker is not None
        if card.worker.fingerprint == self._fingerprint and (
            card.worker.compatibility.get(TENANT_KEY_ID) == self._tenant_key_id
        ):
            return ""
        ours = {**asdict(self._facts.compatibility), TENANT_KEY_ID: self._tenant_key_id}
        different = [name for name, value in ours.items() if card.worker.compatibility.get(name) != value]
        verb = "differs" if len(different) == 1 else "differ"
        return f"worker {card.node_id} is not compatible: {', '.join(different) or 'unknown fields'} {verb}"

    def _publish_targets(self) -> tuple[NodeId, ...]:
        """Cache peers that may get copies: nodes whose only business is to hold KV."""
        cards = self.node.directory.peers(self._reactor.clock())
        willing = replica_candidates(cards, self._fingerprint)
        found = tuple(name for name in willing if self._usable(name, offers=True))
        return found or tuple(NodeId(name) for name in self._static("cache"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: only this one always means the own machine
        return host == "localhost"
