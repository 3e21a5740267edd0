"""Members without the tenant's key that are asked in the place of a worker, and have prompts wait for them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from tests.attacks.kit import Siege
from tests.attacks.rogue_member import FAILURE
from tests.attacks.test_impostors import TOKENS, Impostor
from tests.fleet_rig import Fleet, Reference, answer, prompt
from wire.messages import SourceKind

RESOURCE_EXHAUSTED = 4


@pytest.fixture(scope="module")
def tenants_fleet(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker")
    return empty_fleet


class Late(Impostor):
    """Says what it says when so much time has passed that it is no word of an honest worker; without words: never."""

    AFTER_S = 0.5

    def about(self, job: list[Any]) -> list[list[Any]]:
        if self._said:
            time.sleep(self.AFTER_S)  # what the attack is made of
        return list(self._said)


@pytest.mark.parametrize("says", [[], [[FAILURE, RESOURCE_EXHAUSTED, "no"]]])
def test_impostors_that_say_nothing_or_say_it_late_cost_one_prompt_a_second_and_others_nothing(
    tenants_fleet: Fleet, reference: Reference, says: list[list[Any]]
) -> None:
    """However many names they have, and although they look cheaper than the real worker."""
    primary, seed = Siege(tenants_fleet, "primary"), 360 + 10 * len(says)
    with contextlib.ExitStack() as stack, tenants_fleet["primary"].client() as client:
        # The real worker has worked before.
        assert answer(client, prompt(TOKENS, seed - 1), 3, use_local_cache=False).reused.get(SourceKind.WORKER) == TOKENS - 1
        names = [f"silent-{len(says)}-{number}" for number in range(4)]
        silent = [stack.enter_context(Late(primary.psk, name, *says)) for name in names]
        for impostor in silent:
            impostor.join(primary)
        answers = [answer(client, prompt(TOKENS, seed + number), 3, use_local_cache=False) for number in range(3)]
        assert answers[0].tokens == reference.answer(prompt(TOKENS, seed), 3)
        assert sum(len(impostor.jobs) for impostor in silent) <= 1
        for got in answers:
            assert got.reused.get(SourceKind.WORKER) == TOKENS - 1, "the real worker has done it"
        assert "left alone" in answers[1].reasons
        assert "left alone" in answers[2].reasons
