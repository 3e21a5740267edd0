"""K/V of a token is stored once, here and on peers, also when prompts are answered and chats go on; repeats still hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, Reference, answer, figure, prompt, wait_published
from wire.messages import PrefillPolicy, SourceKind

TURNS, ASKED, ANSWERED = 10, 50, 30
OVERHEAD_MAX = 1.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A window that holds a whole turn: of a narrower one, the rows of a long answer's first block are gone at its end.
    return rig.model_folder(tmp_path_factory, "wide", sliding_window=256)


@pytest.fixture(scope="module")
def running(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "cache")
    return empty_fleet


class Ledger:
    """Bytes stored here, stored on the peer, and sent to it, since it was made; a token's bytes are its unit."""

    def __init__(self, fleet: Fleet, primary: Client, token_bytes: float = 1.0) -> None:
        self._fleet = fleet
        self._primary = primary
        self._token_bytes = token_bytes
        self._before = self._read()

    def tokens(self) -> list[float]:
        wait_published(self._primary)
        return [(now - before) / self._token_bytes for now, before in zip(self._read(), self._before, strict=True)]

    def _read(self) -> list[int]:
        with self._fleet["cache"].client() as cache:
            peer = figure(cache, "cache", "bytes_used")
        return [figure(self._primary, "cache", "bytes_used"), peer, figure(self._primary, "prefill", "bytes_published")]


def test_answered_prompts_and_chats_take_the_room_of_their_tokens(fleet: Fleet, reference: Reference) -> None:
    with fleet["primary"].client() as client:
        ledger = Ledger(fleet, client)
        answer(client, prompt(65, 1), 1, policy=PrefillPolicy.LOCAL_ONLY)
        block_bytes = ledger.tokens()[0]
        token_bytes = block_bytes / 65
        for length in (64, 128, 192, 100):
            ledger = Ledger(fleet, client, token_bytes)
            tokens = prompt(length, 1000 + length)
            cold = answer(client, tokens, 1, policy=PrefillPolicy.LOCAL_ONLY)
            assert all(stored <= length * OVERHEAD_MAX for stored in ledger.tokens()), (length, ledger.tokens())
            for call in ({"policy": PrefillPolicy.LOCAL_ONLY}, {"policy": PrefillPolicy.REMOTE_REQUIRED}):
                local = call["policy"] is PrefillPolicy.LOCAL_ONLY
                again = answer(client, tokens, 1, use_local_cache=local, publish=False, **call)
                source = SourceKind.HOT if local else SourceKind.REMOTE_CACHE
                assert (again.reused, again.tokens) == ({source: length - 1}, cold.tokens)

        ledger, prompts = Ledger(fleet, client, token_bytes), list[list[int]]()
        history: list[int] = []
        with client.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
            for turn in range(TURNS):
                added = prompt(ASKED, 2000 + turn)
                session.append(added)
                prompts.append([*history, *added])
                history = [*prompts[-1], *session.generate(ANSWERED)]
        stored = ledger.tokens()
        assert all(amount <= len(history) * OVERHEAD_MAX for amount in stored), stored
        assert stored[0] >= (len(history) - 1) * 0.99, "and nothing is missing"
        for tokens in (prompts[0], prompts[4], prompts[-1]):
            found = answer(client, tokens, 8, policy=PrefillPolicy.REMOTE_REQUIRED, use_local_cache=False, publish=False)
            assert found.reused == {SourceKind.REMOTE_CACHE: len(tokens) - 1}
            assert found.tokens == reference.answer(tokens, 8)
        rig.wait_idle(client)


def test_a_prompt_that_came_back_from_a_peer_is_a_full_hit_of_the_own_cache_afterwards(
    fleet: Fleet, reference: Reference
) -> None:
    """The peer holds the answered prompt's tail as a cut: who fetches it has to know that, too."""
    tokens = prompt(330, 77)
    expected = reference.answer(tokens, ANSWERED)
    with fleet["primary"].client() as client:
        answer(client, tokens, ANSWERED, policy=PrefillPolicy.LOCAL_ONLY)
        wait_published(client)
    fleet["primary"].kill()
    fleet.heal()
    with fleet["primary"].client() as client:
        for kind in (SourceKind.REMOTE_CACHE, SourceKind.HOT):
            found = answer(client, tokens, ANSWERED)
            assert found.tokens == expected
            assert {source.kind for source in found.appended.explanation.sources if source.end > source.start} == {kind}
