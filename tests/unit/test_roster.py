"""The roster: what it may say, what it means, and whose namespace is whose."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.compat import Compatibility
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.roster import (
    CLIENTS_ONLY_ASK,
    FOREIGN_TENANT,
    NOT_LISTED,
    OTHER_KEY_LISTED,
    ROLE_NOT_LISTED,
    Access,
    Roster,
)
from tests.unit.card_kit import card_blob, identity
from wire.cards import MODELS_MAX, Card, ModelOffering, open_card
from wire.errors import ConfigError
from wire.limits import GIB
from wire.messages import CreateSession, GetRequests, GetStatus, Lookup, PublishOffer, Requirement

TEXT = f"""
[nodes.mac]
key = "{identity("mac").public_key.hex()}"
roles = ["primary"]
tenants = ["red"]
admin = true
[nodes.box]
key = "{identity("box").public_key.hex()}"
roles = ["worker", "cache"]
[tenants.red]
quota_gb = 0.5
"""
TUPLE = Compatibility("m", "r", "t", "q", "d", "v", "h", "g", 64, 0, 0, "red")


def roster(tmp_path: Path, text: str = TEXT) -> Roster:
    path = tmp_path / "fleet.toml"
    path.write_text(text, encoding="utf-8")
    return Roster.load(path)


def card_with(*told: Compatibility, node: str = "box") -> Card:
    models = [
        ModelOffering(
            model_id="m",
            role="worker",
            quantization="",
            tokens_per_second=0.0,
            fingerprint=compatibility.fingerprint(),
            tenant=compatibility.tenant_namespace,
            compatibility=asdict(compatibility),
        )
        for compatibility in told
    ]
    return msgspec.structs.replace(open_card(card_blob(node)), models=tuple(models))


def made_up(number: int, tenant: str = "blue") -> Compatibility:
    return replace(TUPLE, model_id=f"made up {number}", tenant_namespace=tenant)


def test_who_is_admitted(tmp_path: Path) -> None:
    judge = roster(tmp_path).judge
    mac, box = identity("mac").public_key, identity("box").public_key
    assert judge("mac", mac, ("primary",)) == ""
    assert judge("box", box, ("worker", "cache-holder")) == ""
    assert judge("mac", mac, ("worker",)) == ROLE_NOT_LISTED
    assert judge("mac", box, ("primary",)) == OTHER_KEY_LISTED
    assert judge("other", box, ("cache",)) == NOT_LISTED
    assert judge("chat", identity("x").public_key, ("client",)) == ""
    closed = roster(tmp_path, "clients = false\n" + TEXT)
    assert closed.judge("chat", identity("x").public_key, ("client",)) == NOT_LISTED
    assert [closed.may_revoke(key) for key in (mac, box)] == [True, False]


def test_the_roster_stands_above_what_was_seen_first(tmp_path: Path) -> None:
    book = IdentityBook(("me", identity("me").public_key), {"mac": identity("earlier").public_key})
    assert not book.bind("mac", identity("mac").public_key, ("primary",))
    book.judge = roster(tmp_path).judge
    assert book.bind("mac", identity("mac").public_key, ("primary",))
    assert not book.bind("mac", identity("earlier").public_key, ("primary",))


def test_a_namespace_belongs_to_the_tenant_in_its_tuple(tmp_path: Path) -> None:
    access = Access()
    own, foreign = TUPLE, replace(TUPLE, tenant_namespace="blue")
    assert not access.hides("box", own.fingerprint()), "without a roster nothing is hidden"
    access.roster = roster(tmp_path)
    assert access.hides("mac", own.fingerprint()), "nobody has proven it yet"
    for each in (own, foreign):
        access.learn_tuple({**asdict(each), "tenant_key_id": "x"})
    access.learn_tuple({"model_id": "half a tuple"})
    assert access.tenant_of(own.fingerprint()) == "red"
    assert not access.hides("mac", own.fingerprint())
    assert access.hides("mac", foreign.fingerprint())
    assert access.hides("box", own.fingerprint())


def test_what_is_refused(tmp_path: Path) -> None:
    access = Access()
    access.learn_tuple(asdict(TUPLE))
    offer = PublishOffer(fingerprint=TUPLE.fingerprint(), parts=(), suites=(), chunk_bytes_max=1 << 20)
    need = Requirement(block_tokens=64, full=True, window_tokens=0, sink_tokens=0, state=False)
    lookup = Lookup(fingerprint=TUPLE.fingerprint(), requirement=need, block_hashes=b"", lease_ms=0)
    assert access.refusal("box", ("worker",), offer) == ""
    access.roster = roster(tmp_path)
    assert access.refusal("mac", ("primary",), offer) == ""
    assert access.refusal("box", ("worker",), offer) == FOREIGN_TENANT
    assert access.refusal("box", ("worker",), lookup) == "", "a lookup is answered, with nothing"
    assert access.refusal("chat", ("client",), GetStatus()) == ""
    assert access.refusal("chat", ("client",), lookup) == CLIENTS_ONLY_ASK


def test_a_primary_serves_the_nodes_of_its_tenant_and_clients(tmp_path: Path) -> None:
    access = Access()
    access.roster = roster(tmp_path)
    bodies = (CreateSession(), GetRequests(count=1))
    assert [access.refusal("box", ("worker",), body) for body in bodies] == ["", ""], "its model is not loaded yet"
    access.learn_tuple(asdict(TUPLE))
    access.learn(card_with(replace(TUPLE, tenant_namespace="blue")))
    for body in bodies:
        assert access.refusal("mac", ("primary",), body) == ""
        for roles in (("worker",), ("client",)):
            assert access.refusal("box", roles, body) == FOREIGN_TENANT, "listed, for no tenant"
        assert access.refusal("chat", ("client",), body) == ""
    assert access.refusal("box", ("worker",), GetStatus()) == ""
    access.roster = roster(tmp_path, TEXT.replace('tenants = ["red"]', 'tenants = ["blue"]'))
    assert access.refusal("mac", ("primary",), CreateSession()) == FOREIGN_TENANT
    access.roster = None
    assert access.refusal("box", ("worker",), CreateSession()) == ""


def test_a_quota_is_for_all_namespaces_of_a_tenant(tmp_path: Path) -> None:
    access = Access()
    one, two = TUPLE, replace(TUPLE, model_id="other")
    blue = replace(TUPLE, tenant_namespace="blue")
    for each in (one, two, blue):
        access.learn_tuple(asdict(each))
    usage = {two.fingerprint(): 1000, blue.fingerprint(): 10**9}
    assert access.quota_bytes(one.fingerprint(), usage) is None
    access.roster = roster(tmp_path)
    assert access.quota_bytes(one.fingerprint(), usage) == GIB // 2 - 1000
    assert access.quota_bytes(blue.fingerprint(), usage) is None
    assert access.quota_bytes(one.fingerprint(), {two.fingerprint(): GIB}) == 0


def test_no_card_takes_the_place_of_anothers(tmp_path: Path) -> None:
    access = Access()
    access.roster = roster(tmp_path)
    access.learn(card_with(TUPLE, node="mac"))
    for first in range(0, 3000, MODELS_MAX):
        access.learn(card_with(*map(made_up, range(first, first + MODELS_MAX))))
        assert len(access) <= 1 + MODELS_MAX
    assert access.tenant_of(TUPLE.fingerprint()) == "red"
    assert not access.hides("mac", TUPLE.fingerprint())
    access.learn(card_with())
    assert len(access) == 1


def test_what_two_cards_tell_is_known_until_both_have_gone(tmp_path: Path) -> None:
    access, fingerprint = Access(), TUPLE.fingerprint()
    access.learn(card_with(TUPLE))
    access.learn(card_with(TUPLE, node="mac"))
    access.forget("box")
    assert access.tenant_of(fingerprint) == "red"
    access.forget("mac")
    access.forget("mac")
    assert access.tenant_of(fingerprint) is None
    access.learn_tuple(asdict(TUPLE))
    access.learn(card_with(TUPLE))
    access.forget("box")
    assert access.tenant_of(fingerprint) == "red", "the node's own is never forgotten"


def test_only_nodes_of_the_own_tenant_are_asked(tmp_path: Path) -> None:
    """Whatever their cards claim; without a roster everybody is."""
    access = Access()
    assert access.may_be_asked("box")
    access.roster = roster(tmp_path)
    assert not access.may_be_asked("mac"), "the own tenant is not known yet"
    access.learn_tuple(asdict(TUPLE))
    access.learn(card_with(TUPLE, node="box"))
    assert [access.may_be_asked(name) for name in ("mac", "box", "nobody")] == [True, False, False]
    access.roster = roster(tmp_path, TEXT.replace('tenants = ["red"]', 'tenants = ["blue"]'))
    assert not access.may_be_asked("mac"), "the roster was changed"


def test_a_namespace_with_content_stays_in_its_tenants_quota(tmp_path: Path) -> None:
    """Also when the card that told it is followed by others that don't, or by none."""
    access, usage = Access(), {TUPLE.fingerprint(): GIB // 2}
    access.is_held = usage.__contains__
    access.roster = roster(tmp_path)
    access.learn(card_with(TUPLE))
    second = replace(TUPLE, model_id="second")
    access.learn(card_with(second))
    assert access.quota_bytes(TUPLE.fingerprint(), usage) == GIB // 2
    assert access.quota_bytes(second.fingerprint(), usage) == 0, "the first one still counts"
    access.forget("box")
    assert access.tenant_of(TUPLE.fingerprint()) == "red"
    usage.clear()
    access.learn(card_with(second))
    access.forget("box")
    assert len(access) == 0


def test_with_a_roster_a_namespace_of_nobody_takes_no_room(tmp_path: Path) -> None:
    access = Access()
    assert access.quota_bytes(TUPLE.fingerprint(), {}) is None
    access.roster = roster(tmp_path)
    assert access.quota_bytes(TUPLE.fingerprint(), {}) == 0
    access.learn(card_with(made_up(0)))
    assert access.quota_bytes(made_up(0).fingerprint(), {}) is None, "its tenant has no bound"


SPACES = [replace(TUPLE, model_id=str(number), tenant_namespace="red" if number % 2 else "blue") for number in range(6)]


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("card"), st.sampled_from(["mac", "box"]), st.frozensets(st.sampled_from(range(6)), max_size=3)
            ),
            st.tuples(st.just("gone"), st.sampled_from(["mac", "box"]), st.just(frozenset[int]())),
            st.tuples(st.just("stored"), st.just(""), st.frozensets(st.sampled_from(range(6)), max_size=4)),
        ),
        max_size=20,
    )
)
def test_what_is_known_is_what_cards_tell_and_what_is_held(history: list[tuple[str, str, frozenset[int]]]) -> None:
    """After every step, against a plain model: told now is known, for the tenant in its tuple; so is what was known when
    the store took it and is held without a break since. What is neither is unknown after the next card or farewell."""
    access, cards, held, kept = Access(), dict[str, frozenset[int]](), set[int](), set[int]()
    access.is_held = lambda fingerprint: fingerprint in {SPACES[number].fingerprint() for number in held}
    for what, node, numbers in history:
        if what == "card":
            access.learn(card_with(*(SPACES[number] for number in sorted(numbers)), node=node))
            cards[node] = numbers
        elif what == "gone":
            access.forget(node)
            cards.pop(node, None)
        told = frozenset[int]().union(*cards.values())
        if what == "stored":
            # Nobody can store what is not known.
            held = {number for number in numbers if number in told | kept}
        kept = (kept | told) & held
        for number in told | kept:
            assert access.tenant_of(SPACES[number].fingerprint()) == SPACES[number].tenant_namespace
        if what == "gone":
            assert len(access) == len(told | kept)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "oops = 1",
        "clients = 1",
        "nodes = 3",
        "[nodes.x]\nroles = ['cache']",
        "[nodes.x]\nkey = 'zz'",
        "[nodes.x]\nkey = 5",
        f"[nodes.x]\nkey = '{'ab' * 32}'\nroles = ['king']",
        f"[nodes.x]\nkey = '{'ab' * 32}'\nrole = ['cache']",
        f"[nodes.x]\nkey = '{'ab' * 32}'\nadmin = 'yes'",
        f"[nodes.x]\nkey = '{'ab' * 32}'\n[nodes.y]\nkey = '{'ab' * 32}'",
        "[tenants.x]\nquota_gb = 'much'",
        "[tenants.x]\nquota_gb = -1",
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        roster(tmp_path, text)
    assert "\n" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["clients", "nodes", "tenants", "x"]), VALUES))
def test_any_document_is_a_roster_or_a_config_error(document: dict[str, Any]) -> None:
    try:
        Roster.parse(document)
    except ConfigError:
        return
