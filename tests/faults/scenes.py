"""Requests brought to one exact step and held there, by bytes that a proxy does not let pass.

Each scene seeds what it needs, opens the step, and returns when a condition that can be observed says that it is open. Then
the test breaks something and calls ``finish``, which lets the bytes go and gives the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

from kakeya_zmq.client import Client, Session
from tests import fleet_rig as rig
from tests.faults.linked_fleet import LinkedFleet
from tests.faults.matrix import Step
from tests.faults.requests import COUNT, Asking
from tests.fleet_rig import Answer, Fleet, Reference, answer, figure, prompt, wait_published, wait_until
from tests.proxy import Plane, Proxy, Way
from wire.messages import PrefillPolicy

LOOKUP_S, FETCH_S, WORKER_S = 2.0, 3.0, 5.0
COMPUTE_S = 20.0
"""What computing the whole prompt here may take on a machine that is busy with other things."""
DEADLINE_S = LOOKUP_S + FETCH_S + WORKER_S + COMPUTE_S
PUBLISH_STALL_S = 15.0
CARD_TTL_S = 3.0
TOKENS = 700
PREFIX = 512
"""What the cache peer holds in the scene of the lease: not all, so that the asker waits for another peer."""
HELD_AFTER_BYTES = 96 * 1024
"""Of a bulk connection: past its handshake and manifest, inside the first part."""
LONG_ANSWER = 200
STRIKE_AT = 20
PRIMARY_FLAGS = (
    *("--cache-lookup-timeout-s", f"{LOOKUP_S:g}", "--cache-fetch-timeout-s", f"{FETCH_S:g}"),
    *("--prefill-worker-timeout-s", f"{WORKER_S:g}"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the user got, and what it must be."""

    tokens: list[int]
    expected: list[int]
    reasons: str


class Scene(ABC):
    """One request at one step."""

    step: ClassVar[Step]
    victim: ClassVar[str] = "cache"
    plane: ClassVar[Plane] = Plane.CONTROL
    way: ClassVar[Way] = Way.TO_CLIENT
    deadline_s: ClassVar[float]
    """Of the step, after which the primary must have gone on."""

    def __init__(self, fleet: LinkedFleet, client: Client, reference: Reference, seed: int) -> None:
        self.fleet = fleet
        self.client = client
        self.reference = reference
        self.tokens = prompt(TOKENS, seed)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for proxy in self.fleet.proxies.values():
            proxy.release()
        self._stack.close()

    @property
    def proxy(self) -> Proxy:
        return self.fleet.proxies[self.victim]

    @abstractmethod
    def prepare(self) -> None:
        """Seed caches; nothing is open afterwards."""

    @abstractmethod
    def open(self) -> None:
        """Begin, and return when the step is open."""

    @abstractmethod
    def finish(self) -> Outcome:
        """Let it go on."""

    def release(self) -> None:
        for proxy in self.fleet.proxies.values():
            proxy.release()

    def figure(self, section: str, name: str) -> int:
        return figure(self.client, section, name)

    def wait_more(self, section: str, name: str, before: int) -> None:
        wait_until(lambda: self.figure(section, name) > before, f"{section}.{name} has grown")

    def ask_again(self, tokens: Sequence[int], *exclude: str) -> None:
        """Ask without looking into the primary's own store."""
        self.asking = Asking(
            self.client, tokens, DEADLINE_S, use_local_cache=False, publish=False, exclude_nodes=list(exclude)
        )

    def asked(self) -> Outcome:
        said: Answer = self.asking.result()
        return Outcome(said.tokens, self.reference.answer(self.tokens, COUNT), said.reasons)

    def publish_to_cache(self, tokens: Sequence[int]) -> None:
        answer(self.client, tokens, 1, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(self.client)
        self.fleet.wait_card("cache", lambda row: row.get("cache_entries", 0) > 0, "the cache's card tells of its contents")
        rig.wait_idle(self.client)


class Lookup(Scene):
    step = Step.LOOKUP
    deadline_s = LOOKUP_S

    def prepare(self) -> None:
        self.publish_to_cache(self.tokens)

    def open(self) -> None:
        self.proxy.hold(Plane.CONTROL)
        self.ask_again(self.tokens, "worker")
        wait_until(lambda: self.figure("node", "open_asks") >= 1, "the cache is being asked")

    def finish(self) -> Outcome:
        self.release()
        return self.asked()


class Lease(Scene):
    step = Step.LEASE
    way = Way.TO_SERVER
    deadline_s = LOOKUP_S + FETCH_S

    def prepare(self) -> None:
        self.publish_to_cache(self.tokens[:PREFIX])
        if figure_of(self.fleet, "worker", "cache", "entry_count") == 0:
            with rig.worker_only(self.client) as session:
                session.append(prompt(200, seed=1), timeout_s=DEADLINE_S)
        self.fleet.wait_card("worker", lambda row: row.get("cache_entries", 0) > 0, "the worker's card tells of its cache")

    def open(self) -> None:
        cache = self._stack.enter_context(self.fleet["cache"].client())
        self.fleet.proxies["worker"].hold(Plane.CONTROL)
        self.ask_again(self.tokens)
        wait_until(lambda: figure(cache, "cache", "leases") >= 1, "the cache has leased its blocks")
        assert self.asking.running

    def finish(self) -> Outcome:
        self.release()
        return self.asked()


class Fetch(Lookup):
    step = Step.FETCH
    plane = Plane.BULK
    deadline_s = FETCH_S

    def open(self) -> None:
        self.proxy.hold(Plane.BULK, Way.TO_CLIENT, after=HELD_AFTER_BYTES)
        self.ask_again(self.tokens, "worker")
        wait_until(lambda: self.proxy.held(Plane.BULK, Way.TO_CLIENT) >= 1, "the fetch is half through")


class Submit(Scene):
    step = Step.SUBMIT
    victim = "worker"
    deadline_s = WORKER_S

    def prepare(self) -> None:
        rig.wait_idle(self.client)

    def open(self) -> None:
        before = self.figure("prefill", "remote_jobs")
        self.proxy.hold(Plane.CONTROL)
        self.ask_again(self.tokens, "cache")
        self.wait_more("prefill", "remote_jobs", before)

    def finish(self) -> Outcome:
        self.release()
        return self.asked()


class Run(Submit):
    step = Step.RUN
    plane = Plane.BULK

    def open(self) -> None:
        self.proxy.hold(Plane.BULK, Way.TO_CLIENT, after=HELD_AFTER_BYTES)
        self.ask_again(self.tokens, "cache")
        wait_until(self.asking.working.is_set, "the worker computes")
        wait_until(lambda: self.proxy.held(Plane.BULK, Way.TO_CLIENT) >= 1, "the worker's first part is half through")


class Publish(Scene):
    step = Step.PUBLISH
    plane = Plane.BULK
    way = Way.TO_SERVER
    deadline_s = PUBLISH_STALL_S

    def prepare(self) -> None:
        rig.wait_idle(self.client)

    def open(self) -> None:
        before = self.figure("prefill", "publish_attempts")
        self._failures = self.figure("prefill", "publish_failures")
        self.proxy.hold(Plane.BULK, Way.TO_SERVER, after=HELD_AFTER_BYTES)
        self.asking = Asking(self.client, self.tokens, DEADLINE_S, policy=PrefillPolicy.LOCAL_ONLY)
        self.wait_more("prefill", "publish_attempts", before)
        wait_until(lambda: self.proxy.held(Plane.BULK, Way.TO_SERVER) >= 1, "the first part is half through")

    def finish(self) -> Outcome:
        said = self.asking.result()  # nobody waits for a publish
        self.release()
        wait_until(self._has_failed, "the failure is counted", PUBLISH_STALL_S + 10)
        last_error = str(self.client.status().sections["prefill"]["last_publish_error"])
        return Outcome(said.tokens, self.reference.answer(self.tokens, COUNT), f"{said.reasons}; {last_error}")

    def _has_failed(self) -> bool:
        return self.figure("prefill", "publish_failures") > self._failures


class Gossip(Scene):
    step = Step.GOSSIP
    deadline_s = CARD_TTL_S

    def prepare(self) -> None:
        rig.wait_idle(self.client)

    def open(self) -> None:
        before = self.figure("node", "fleet_exchanges")
        self.failures = self.figure("prefill", "exchange_failures")
        self.proxy.hold(Plane.CONTROL)
        # Two rounds with both peers: one with the victim is certainly under way.
        self.wait_more("node", "fleet_exchanges", before + 3)

    def finish(self) -> Outcome:
        self.release()
        said = Asking(self.client, self.tokens, DEADLINE_S, publish=False).result()
        self.wait_more("prefill", "exchange_failures", self.failures)
        return Outcome(said.tokens, self.reference.answer(self.tokens, COUNT), said.reasons)


class Decode(Scene):
    step = Step.DECODE
    deadline_s = 1.0

    def prepare(self) -> None:
        rig.wait_idle(self.client)
        self.session: Session = self._stack.enter_context(self.client.create_session(publish=False))
        self.session.append(self.tokens, timeout_s=DEADLINE_S)

    def open(self) -> None:
        self._stream: Iterator[int] = self.session.generate(LONG_ANSWER, inter_token_timeout_s=DEADLINE_S)
        self._found = [next(self._stream) for _ in range(STRIKE_AT)]

    def finish(self) -> Outcome:
        self._found += list(self._stream)
        return Outcome(self._found, self.reference.answer(self.tokens, LONG_ANSWER), "")


SCENES: dict[Step, type[Scene]] = {
    scene.step: scene for scene in (Lookup, Lease, Fetch, Submit, Run, Publish, Gossip, Decode)
}


def figure_of(fleet: Fleet, node: str, section: str, name: str) -> int:
    with fleet[node].client() as client:
        return figure(client, section, name)
