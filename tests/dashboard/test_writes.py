"""Writes: who may, what is refused with which code, what is kept; pairing over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dashboard.http import Access
from dashboard.pairing import Claim, make_claim
from tests.dashboard.kit import snapshot
from tests.dashboard.web_kit import API_KEY, Answer, Web
from wire.keys import NodeIdentity

REGISTER = "/v1/network/nodes/register"
REDEEM = "/v1/network/nodes/register/redeem"
GROUPS = "/v1/network/groups"
TOKENS = "/v1/network/telemetry/tokens"
RUNS = "/v1/network/benchmarks"
GOOD: dict[str, Any] = {"alias": "allens-mini", "address": "169.254.27.104:52051", "region": "Private", "role": "cache"}


# --- keys ------------------------------------------------------------------------------------------------------------


def test_every_write_needs_the_key_and_none_is_open_without_one(web: Web, keyless: Web) -> None:
    writes = [route for route in web.routes if route.access in (Access.WRITE, Access.ADMIN)]
    assert len(writes) >= 9
    for route in writes:
        path = route.path.replace("<run_id>", "br_x").replace("<registration_id>", "x")
        for key in (None, "", "wrong", f"{API_KEY}x", "ü" * 9):
            assert web.call(route.method, path, {}, key=key and key.encode().decode("latin-1")).status == 401, path
        for key in (None, "", "anything"):
            answer = keyless.call(route.method, path, {}, key=key)
            assert answer.status == 403
            assert "closed" in answer.json["detail"]
    assert web.get("/v1/network/nodes") == keyless.get("/v1/network/nodes") == []


def test_the_key_of_a_wrong_read_shows_no_more_than_no_key(web: Web) -> None:
    web.tell(snapshot())
    assert web.get("/v1/network/nodes", key="wrong") == web.get("/v1/network/nodes")


def test_attempts_are_limited_and_the_right_key_is_not_locked_out(web: Web) -> None:
    statuses = [web.call("GET", "/healthz", key="guess").status for _ in range(101)]
    assert statuses == [200] * 100 + [429]
    answer = web.post(GROUPS, {"name": "g", "node_ids": ["a"]}, key="guess")
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    assert web.post(GROUPS, {"name": "g", "node_ids": ["a"]}).status == 200
    assert web.call("GET", "/healthz").status == 200
    assert web.post(REGISTER, GOOD).status == 200
    redemptions = [web.call("POST", REDEEM, {}).status for _ in range(101)]
    assert redemptions == [422] * 100 + [429]
    assert web.post(REGISTER, GOOD).status == 200
    web.clocks.pass_time(1.0)
    assert web.call("POST", REDEEM, {}).status == 422


def test_another_page_cannot_redeem_nor_use_up_attempts_from_a_browser(web: Web) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert web.call("POST", REDEEM, raw=b"{}", headers={"Content-Type": kind}).status == 415
    for _ in range(101):
        web.call("POST", REDEEM, raw=b"{}", headers={"Content-Type": "text/plain"})
    assert web.call("POST", REDEEM, {}, headers={"Content-Type": "application/json; charset=utf-8"}).status == 422


def test_maintenance_is_not_there_until_a_primary_offers_capture(web: Web) -> None:
    assert web.call("GET", "/v1/network/maintenance/capture", key=API_KEY).status == 404
    assert web.post("/v1/network/maintenance/capture/drain", {"max_items": 8}).status == 404
    assert web.post("/v1/network/maintenance/capture/drain", {"max_items": 65}).status == 422


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (REGISTER, GOOD, 200),
        (REGISTER, {"alias": "a", "address": "abc"}, 200),
        (REGISTER, {**GOOD, "alias": ""}, 422),
        (REGISTER, {**GOOD, "alias": "x" * 101}, 422),
        (REGISTER, {**GOOD, "alias": 7}, 422),
        (REGISTER, {**GOOD, "address": "ab"}, 422),
        (REGISTER, {**GOOD, "address": "x" * 256}, 422),
        (REGISTER, {**GOOD, "region": "x" * 101}, 422),
        (REGISTER, {**GOOD, "role": "king"}, 422),
        (REGISTER, {"alias": "a"}, 422),
        (REGISTER, [], 422),
        (GROUPS, {"name": "g", "node_ids": ["a"]}, 200),
        (GROUPS, {"name": "g", "node_ids": []}, 422),
        (GROUPS, {"name": "", "node_ids": ["a"]}, 422),
        (GROUPS, {"name": "g", "node_ids": [1]}, 422),
        (GROUPS, {"name": "g"}, 422),
        (TOKENS, {"node_id": "n", "completed": 5}, 200),
        (TOKENS, {"node_id": "n", "completed": 5, "kv_assisted": 5}, 200),
        (TOKENS, {"node_id": "n", "completed": 5, "kv_assisted": 6}, 400),
        (TOKENS, {"node_id": "n", "completed": -1}, 422),
        (TOKENS, {"node_id": "n", "completed": True}, 422),
        (TOKENS, {"node_id": "", "completed": 1}, 422),
        (TOKENS, {"node_id": "n", "completed": 2**60}, 422),
        (RUNS, {}, 200),
        (RUNS, {"kind": "x" * 101}, 422),
        (RUNS, {"config": []}, 422),
        (RUNS, {"config": {"prompt": "x"}}, 400),
        (RUNS, {"config": {"a": {"token_ids": [1]}}}, 400),
        (RUNS, {"config": {"a": ["b", "at 169.254.1.2"]}}, 400),
        (RUNS, {"config": {"/Users/x": 1}}, 400),
        (RUNS, {"started_at": "noon"}, 422),
    ],
)
def test_bodies_are_checked(web: Web, path: str, body: object, status: int) -> None:
    answer = web.post(path, body)
    assert answer.status == status, answer.body
    if status != 200:
        assert answer.json.keys() == {"detail"}


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"\xff\xfe", 422),
        (b'"text"', 422),
        (b'{"alias": "\\ud800", "address": "abc"}', 422),
        (b"nan", 422),
    ],
)
def test_what_is_no_json_is_refused(web: Web, raw: bytes, status: int) -> None:
    assert web.call("POST", REGISTER, raw=raw, key=API_KEY).status == status


@pytest.mark.parametrize("path", [REDEEM, RUNS])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_bodies_that_are_nested_too_deeply_are_refused(web: Web, path: str, opening: str, closing: str) -> None:
    for depth in (20, 900, 8_000):
        body = f'{{"config":{opening * depth}1{closing * depth}}}'.encode()
        assert web.call("POST", path, raw=body, key=API_KEY).status in (400, 422), depth


def test_a_state_that_cannot_be_written_is_told_and_works_again(web: Web) -> None:
    with web.database.transaction() as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    web.database.rows(f"PRAGMA max_page_count = {pages}")
    statuses = {}
    for _ in range(200):
        answer = web.post(GROUPS, {"name": "n" * 60, "node_ids": ["m" * 100 + str(number) for number in range(200)]})
        statuses[answer.status] = answer
        if answer.status != 200:
            break
    assert statuses[503].json["detail"] == "the state cannot be written: database or disk is full"
    assert web.call("GET", "/v1/network/groups").status == 200
    web.database.rows("PRAGMA max_page_count = 1000000")
    assert web.post(GROUPS, {"name": "g", "node_ids": ["a"]}).status == 200


def test_bodies_that_are_too_large_are_refused_before_they_are_read(web: Web) -> None:
    assert web.call("POST", REGISTER, raw=b'{"alias": "' + b"x" * 70_000 + b'"}', key=API_KEY).status == 413
    run = web.post(RUNS, {}).json["id"]
    large = b'{"stages": [' + b",".join([b'{"name": "remote_compute", "note": "%s"}' % (b"x" * 1000)] * 200) + b"]}"
    assert web.call("PATCH", f"{RUNS}/{run}", raw=large, key=API_KEY).status == 200
    assert web.call("PATCH", f"{RUNS}/{run}", raw=b"x" * 1_100_000, key=API_KEY).status == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = (
    *("alias", "address", "region", "role", "name", "node_ids", "node_id", "completed", "kv_assisted", "kind", "config"),
    *("started_at", "stages", "status", "finished_at", "token_id", "public_key", "proof", "signature"),
)
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JSON))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(body=FIELDS, path=st.sampled_from([REGISTER, REDEEM, GROUPS, TOKENS, RUNS]))
def test_no_body_makes_an_internal_error(web: Web, body: dict[str, object], path: str) -> None:
    client = web.app.test_client()
    web.clocks.pass_time(10.0)
    answer = client.post(path, data=json.dumps(body), content_type="application/json", headers={"X-API-Key": API_KEY})
    assert answer.status_code in (200, 400, 401, 404, 409, 422, 429), answer.data


# --- registrations ---------------------------------------------------------------------------------------------------


def test_a_registration_has_the_fields_of_the_reference_and_its_token_is_shown_once(web: Web) -> None:
    made = web.post(REGISTER, GOOD).json
    assert made.keys() == {
        *("id", "alias", "address", "region", "role", "status", "pairing_token", "created_at", "expires_at")
    }
    assert len(made["id"]) == 16
    assert made["pairing_token"].startswith("kn_pair_")
    assert len(made["pairing_token"]) == len("kn_pair_") + 24
    assert made["expires_at"] - made["created_at"] == 600.0
    assert made["status"] == "pending"
    for route in web.routes:
        if route.method == "GET" and not route.path.endswith("/events") and "<" not in route.path:
            assert made["pairing_token"] not in web.call("GET", route.path, key=API_KEY).text
    (node,) = web.get("/v1/network/nodes")
    assert (node["alias"], node["status"], node["role"], node["endpoint"]["network"]) == (
        "allens-mini",
        "pending",
        "cache",
        "pending",
    )
    assert node["endpoint"]["address"] == ""
    assert web.get("/v1/network/summary")["registered_nodes"] == 1


def test_an_empty_region_is_private(web: Web) -> None:
    assert web.post(REGISTER, {**GOOD, "region": ""}).json["region"] == "Private"


def test_a_registration_gives_a_heard_node_its_region_and_role(web: Web) -> None:
    web.post(REGISTER, {**GOOD, "alias": "primary", "region": "Attic", "role": "head"})
    web.tell(snapshot(), "primary")
    (node,) = web.get("/v1/network/nodes")
    assert (node["region"], node["role"], node["status"], node["paired"]) == ("Attic", "head", "online", False)


def test_pending_registrations_expire(web: Web) -> None:
    token = web.post(REGISTER, GOOD).json["pairing_token"]
    web.clocks.pass_time(599.0)
    assert len(web.get("/v1/network/nodes")) == 1
    web.clocks.pass_time(1.0)
    assert web.get("/v1/network/nodes") == []
    assert redeem(web, token, NodeIdentity.generate()).status == 404
    assert web.database.rows("SELECT * FROM registrations") == []


# --- pairing -----------------------------------------------------------------------------------------------------------


def body_of(claim: Claim) -> dict[str, str]:
    return {
        "token_id": claim.token_id,
        "node_id": claim.node_id,
        "public_key": claim.public_key.hex(),
        "proof": claim.proof.hex(),
        "signature": claim.signature.hex(),
    }


def redeem(web: Web, token: str, identity: NodeIdentity, node_id: str = "mini-1") -> Answer:
    """As a node does it: without the API key."""
    return web.call("POST", REDEEM, body_of(make_claim(token, node_id, identity)))


def test_a_node_pairs_by_proving_token_and_key_and_stays_paired(web: Web) -> None:
    identity = NodeIdentity.generate()
    token = web.post(REGISTER, {**GOOD, "region": "Attic"}).json["pairing_token"]
    sent = json.dumps(body_of(make_claim(token, "mini-1", identity)))
    assert token not in sent
    answer = redeem(web, token, identity)
    assert answer.status == 200
    assert (answer.json["alias"], answer.json["node_id"], answer.json["status"]) == ("allens-mini", "mini-1", "paired")
    web.clocks.pass_time(10_000.0)
    (node,) = web.get("/v1/network/nodes")
    assert (node["id"], node["alias"], node["status"], node["paired"]) == ("mini-1", "allens-mini", "offline", True)
    web.tell(snapshot(), "mini-1")
    (node,) = web.get("/v1/network/nodes")
    assert (node["alias"], node["region"], node["status"], node["paired"]) == ("allens-mini", "Attic", "online", True)


def test_repeating_a_redemption_changes_nothing_and_nobody_else_can_use_the_token(web: Web) -> None:
    identity = NodeIdentity.generate()
    token = web.post(REGISTER, GOOD).json["pairing_token"]
    first = redeem(web, token, identity)
    assert redeem(web, token, identity).json == first.json
    assert redeem(web, token, NodeIdentity.generate()).status == 409
    assert redeem(web, token, identity, "other-node").status == 409


def test_a_node_id_is_bound_to_its_first_key_until_an_administrator_removes_it(web: Web) -> None:
    owner, thief = NodeIdentity.generate(), NodeIdentity.generate()
    first = web.post(REGISTER, GOOD).json
    assert redeem(web, first["pairing_token"], owner).status == 200
    second = web.post(REGISTER, GOOD).json["pairing_token"]
    assert redeem(web, second, thief).status == 409
    assert web.call("DELETE", f"{REGISTER}/{first['id']}", key=API_KEY).json == {"status": "removed"}
    assert web.call("DELETE", f"{REGISTER}/{first['id']}", key=API_KEY).status == 404
    assert redeem(web, second, thief).status == 200


def test_a_node_that_pairs_again_replaces_its_registration(web: Web) -> None:
    identity = NodeIdentity.generate()
    for alias in ("first", "second"):
        token = web.post(REGISTER, {**GOOD, "alias": alias}).json["pairing_token"]
        assert redeem(web, token, identity).status == 200
    assert [node["alias"] for node in web.get("/v1/network/nodes")] == ["second"]


@pytest.mark.parametrize("field", ["token_id", "node_id", "public_key", "proof", "signature"])
def test_a_claim_of_which_anything_was_changed_is_refused(web: Web, field: str) -> None:
    identity, other = NodeIdentity.generate(), NodeIdentity.generate()
    token = web.post(REGISTER, GOOD).json["pairing_token"]
    good = body_of(make_claim(token, "mini-1", identity))
    bad = body_of(make_claim(web.post(REGISTER, GOOD).json["pairing_token"], "mini-2", other))
    assert web.call("POST", REDEEM, {**good, field: bad[field]}).status in (401, 404)
    assert all(node["status"] == "pending" for node in web.get("/v1/network/nodes"))


def test_a_signature_by_another_key_is_refused(web: Web) -> None:
    token = web.post(REGISTER, GOOD).json["pairing_token"]
    claim = body_of(make_claim(token, "mini-1", NodeIdentity.generate()))
    assert web.call("POST", REDEEM, {**claim, "signature": "0" * 128}).status == 401
    assert web.call("POST", REDEEM, {**claim, "signature": "0" * 127}).status == 422


# --- groups and tokens -----------------------------------------------------------------------------------------------


def test_groups_keep_order_drop_repetitions_and_count_who_is_online(web: Web) -> None:
    made = web.post(GROUPS, {"name": "Pair", "node_ids": ["primary", "ghost", "primary", "worker-1"]}).json
    assert made.keys() == {"id", "name", "node_ids", "created_at"}
    assert made["node_ids"] == ["primary", "ghost", "worker-1"]
    assert len(made["id"]) == 12
    web.tell(snapshot(), "primary")
    (group,) = web.get(GROUPS)
    assert [member["id"] for member in group["members"]] == ["primary"]
    assert group["online"] == 1
    topology = web.get("/v1/network/topology")
    assert [(edge["source"], edge["target"]) for edge in topology["edges"]] == [
        ("primary", "ghost"),
        ("primary", "worker-1"),
    ]
    assert {edge["group_id"] for edge in topology["edges"]} == {made["id"]}
    assert [node["id"] for node in topology["nodes"]] == ["primary"]


def test_reported_tokens_are_added_up(web: Web) -> None:
    for node_id, completed, assisted in (("a", 60, 40), ("a", 20, 0), ("b", 20, 0)):
        body = {"node_id": node_id, "completed": completed, "kv_assisted": assisted}
        assert web.post(TOKENS, body).json == {"status": "accepted"}
    assert web.get("/v1/network/tokens") == {"completed": 100, "kv_assisted": 40, "hit_rate": 0.4}
