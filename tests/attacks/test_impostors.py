"""A member without the tenant's key that is asked in the place of a worker, in a fleet without a roster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kakeya_zmq.protocol.offload_seal import COULD_NOT_OPEN, WITHOUT_PROOF
from kakeya_zmq.protocol.work_door import NOT_SEALED_FOR_US
from tests.attacks.impostor import SUBMIT, Claims
from tests.attacks.kit import RawClient, Siege
from tests.attacks.rogue_member import FAILURE
from tests.fleet_rig import Fleet, Reference, answer, figure, prompt
from tests.vectors import independent as wire
from tests.vectors.independent import Identity
from wire.messages import SourceKind

PROGRESS, UNAUTHENTICATED = 5, 13
TOKENS = 700
GRANT = [200, bytes(16), 9, "0" * 32, bytes(32), 1, 65_536, 0]


@pytest.fixture(scope="module")
def tenants_fleet(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker")
    return empty_fleet


class Impostor(Claims):
    """Copies the worker's card, keeps what it is sent, and says to a job what it is told to."""

    def __init__(self, psk: bytes, name: str, *says: list[Any]) -> None:
        self.jobs: list[list[Any]] = []
        self._said = says
        super().__init__(psk, Identity.new(name))

    def _says(self, body: list[Any]) -> list[list[Any]]:
        if body[0] != SUBMIT:
            return super()._says(body)
        self.jobs.append(body)
        return self.about(body)

    def about(self, job: list[Any]) -> list[list[Any]]:
        return list(self._said)


class Relay(Impostor):
    """Has the real worker do the job, or tries to, and hands on what that one says."""

    def __init__(self, psk: bytes, name: str, worker: str) -> None:
        super().__init__(psk, name)
        self._worker = worker
        self.heard: list[list[Any]] = []

    def about(self, job: list[Any]) -> list[list[Any]]:
        with RawClient(self._worker, self._psk) as client:
            said = client.ask(client.join(self.who, roles=("worker", "cache")), job)
        self.heard.append(said)
        return [[said[0], *said[2:]]]


def clear_tokens(tokens: list[int]) -> Iterator[bytes]:
    for start in range(len(tokens) - 2):
        yield b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 3])


def asked_instead(fleet: Fleet, reference: Reference, impostor: Impostor, seed: int, reason: str) -> None:
    """The impostor is asked first, gets nothing it can read, and the prompt is answered as if it were not there."""
    primary, tokens = Siege(fleet, "primary"), prompt(TOKENS, seed)
    expected = reference.answer(tokens, 3)
    with impostor:
        impostor.join(primary)
        with primary.expect(reason), fleet["primary"].client() as client:
            got = answer(client, tokens, 3, use_local_cache=False)
            again = answer(client, prompt(TOKENS, seed + 100), 3, use_local_cache=False)
        assert got.tokens == expected
        assert got.reused.get(SourceKind.WORKER) == TOKENS - 1, "the real worker has done it"
        assert f"worker {impostor.who.node_id} did not prove that it has this tenant's key" in got.reasons
        assert len(impostor.jobs) == 1, "it is not asked again for a while"
        assert "left alone" in again.reasons
        told = wire.msgpack.packb(impostor.jobs)
        assert not any(piece in told for piece in clear_tokens(tokens))


@pytest.mark.parametrize(
    ("name", "says", "reason"),
    [
        ("grants", [[PROGRESS, GRANT]], WITHOUT_PROOF),
        ("makes-proofs-up", [[PROGRESS, [203, bytes(32), 0, 0, 0]], [PROGRESS, GRANT]], WITHOUT_PROOF),
        ("refuses", [[FAILURE, UNAUTHENTICATED, "no"]], COULD_NOT_OPEN),
    ],
)
def test_an_impostor_is_given_no_prompt_and_nothing_it_sends_is_used(
    tenants_fleet: Fleet, reference: Reference, name: str, says: list[list[Any]], reason: str
) -> None:
    seed = 300 + len(name)
    asked_instead(tenants_fleet, reference, Impostor(Siege(tenants_fleet, "primary").psk, name, *says), seed, reason)


def test_the_real_worker_opens_and_proves_nothing_for_an_impostor(tenants_fleet: Fleet, reference: Reference) -> None:
    """The job of a primary, sent on as the impostor's own: it was sealed for another worker, and by another asker."""
    primary, worker = Siege(tenants_fleet, "primary"), Siege(tenants_fleet, "worker")
    relay = Relay(primary.psk, "relays", worker.address)
    with worker.expect(NOT_SEALED_FOR_US):
        asked_instead(tenants_fleet, reference, relay, 340, COULD_NOT_OPEN)
    assert [said[0] for said in relay.heard] == [FAILURE]
    assert relay.heard[0][2] == UNAUTHENTICATED


def test_a_member_without_the_tenants_key_has_nothing_computed(tenants_fleet: Fleet) -> None:
    worker, who = Siege(tenants_fleet, "worker"), Identity.new("has-no-tenant-key")
    with tenants_fleet["worker"].client() as client:
        before = figure(client, "prefill", "jobs_accepted")
        with worker.expect(NOT_SEALED_FOR_US, count=2), worker.client() as raw:
            session = raw.join(who, roles=("primary",))
            cards = map(wire.read_card, raw.ask(session, [1, [], [], b"", [], b""])[2][1])
            card = next(fields for fields in cards if fields[0] == "worker")
            namespace, worker_key = card[12][0], card[1]
            binding = wire.job_binding(namespace, b"j" * 16, who.public, worker_key)
            tokens = b"".join(token.to_bytes(4, "little") for token in prompt(100, 1))
            sealed = wire.seal_job_prompt(wire.os.urandom(32), binding, wire.os.urandom(24), tokens)
            for number, content in enumerate((sealed, tokens), start=2):
                job = [SUBMIT, b"j" * 16, namespace, content, 0, [1], 65_536, 2**20, 0, 1, 0]
                assert raw.ask(session, job, number=number)[::2] == [FAILURE, UNAUTHENTICATED]
        assert figure(client, "prefill", "jobs_accepted") == before
