"""The prefill worker: takes prefill-only jobs, keeps what it computed in its own cache, never serves users."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil

from daemons.engine_host import make_runner
from daemons.node import Node
from daemons.node_keys import load_keys
from daemons.supervision import Supervisor
from kakeya_zmq.compat import TENANT_KEY_ID, tenant_key_id
from kakeya_zmq.config import Settings
from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.model.reserve import give_back_reserve
from kakeya_zmq.protocol.work import WorkService, WorkSettings
from kakeya_zmq.telemetry import Value
from wire.cards import WorkerOffering
from wire.keys import load_or_create_tenant_key

DRAIN_SECONDS = 10.0


class Worker:
    """A :class:`daemons.run.Daemon`.

    Raises:
        KakeyaError: keys, addresses or the model folder are not usable.
    """

    def __init__(self, reactor: Reactor, settings: Settings) -> None:
        self._reactor = reactor
        self._settings = settings
        self._tenant_key = load_or_create_tenant_key(Path(settings.tenant_key_file))
        self.node = Node(reactor, settings, load_keys(settings), roles=("worker", "cache-holder"))
        self._work: WorkService | None = None
        self._ram_bytes_free = 0
        self._facts: ModelFacts | None = None
        self._ready: Callable[[dict[str, object]], None] = lambda facts: None
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._runner = make_runner(
            reactor, settings, self.node.dispatcher, on_ready=self._engine_ready, on_failed=lambda error: self._fail(error)
        )

        self._supervisor = Supervisor(
            reactor,
            settings,
            self.node,
            self._runner,
            work=self,
            fail=lambda error: self._fail(error),
            give_back=give_back_reserve,
        )

    def sessions(self) -> int:
        """Jobs that wait or run."""
        return self._work.queued_jobs + self._work.running_jobs if self._work is not None else 0

    def decoding(self) -> bool:
        return False

    def begin(self, ready: Callable[[dict[str, object]], None], fail: Callable[[BaseException], None]) -> None:
        self._ready = ready
        self._fail = fail
        self._runner.start()

    def drain(self, reason: str) -> None:
        self.node.drain(reason)

    def drained(self) -> bool:
        return self._work is None or (self._work.idle and self.node.quiet)

    def end(self, reason: str) -> None:
        self._supervisor.close()
        if self._work is not None:
            # Askers learn at once that their jobs end here, and go elsewhere.
            self.node.dispatcher.apply(
                self._work, self._work.shutdown(f"the worker is stopping: {reason}", self._reactor.clock())
            )
        self.node.close(reason)
        self._runner.stop(DRAIN_SECONDS)

    def _engine_ready(self, facts: ModelFacts, tokens_per_second: float) -> None:
        node = self.node
        self._facts = facts
        node.facts = facts
        node.tenant_key_id = tenant_key_id(self._tenant_key)
        self._work = WorkService(
            facts=facts,
            tenant_key=self._tenant_key,
            identity_public_key=node.local.identity.public_key,
            store=node.store,
            ids=node.ids,
            has_aes=node.has_aes,
            settings=WorkSettings(
                max_jobs=self._settings.max_jobs,
                max_jobs_per_asker=self._settings.max_jobs_per_node,
                max_prompt_tokens=self._settings.max_prompt_tokens,
                default_tokens_per_second=self._settings.worker_prefill_tps,
            ),
        )
        self._work.tokens_per_second = tokens_per_second
        node.emptying.also.append(self._let_go)
        node.worker_offering = self._offering
        node.dispatcher.add(self._work, handles=self._work.handles, extra=node.carry_out)
        node.sections.append(self._section)
        node.open()
        reached = {"address": str(node.address), "bus_port": node.endpoints.bus_port}
        self._ready({**reached, "model_id": facts.compatibility.model_id})

    def _let_go(self) -> None:
        """The store was emptied, as what was in it may be wrong."""
        assert self._work is not None
        self.node.dispatcher.apply(self._work, self._work.distrust_store(self._reactor.clock()))

    def _offering(self) -> WorkerOffering:
        assert self._work is not None
        assert self._facts is not None
        work = self._work
        return WorkerOffering(
            fingerprint=self._facts.compatibility.fingerprint(),
            compatibility={**asdict(self._facts.compatibility), TENANT_KEY_ID: tenant_key_id(self._tenant_key)},
            max_concurrent_jobs=1,
            inflight_jobs=work.running_jobs,
            queued_jobs=work.queued_jobs,
            queued_tokens=work.queued_tokens,
            load=work.load,
            prefill_tokens_per_second=work.tokens_per_second,
            ram_bytes_free=self._available_bytes(),
            accepts_jobs=self.node.admission.accepting,
        )

    def _available_bytes(self) -> int:
        # To look takes a descriptor, and a card is made also when none is free: then as it was.
        with contextlib.suppress(OSError):
            self._ram_bytes_free = psutil.virtual_memory().available
        return self._ram_bytes_free

    def _section(self) -> tuple[str, dict[str, Value]]:
        assert self._work is not None
        assert self._facts is not None
        work = self._work
        return "worker", {
            "model_id": self._facts.compatibility.model_id,
            "fingerprint": self._facts.compatibility.fingerprint().hex()[:16],
            "queued_jobs": work.queued_jobs,
            "running_jobs": work.running_jobs,
            "queued_tokens": work.queued_tokens,
            "prefill_tokens_per_second": round(work.tokens_per_second, 1),
            "engine_failures": self._runner.failures,
        }
