"""Nothing private leaves without the key: tell-tales in every field that can hold text, searched in every public answer."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.http import Access
from dashboard.live_events import TOPICS
from dashboard.redaction import OTHER, REASONS, Eyes, label, model_name, reason_kind
from tests.dashboard.fixtures_fleet import PRIVATE, tell_fleet, tell_hostile_node
from tests.dashboard.web_kit import API_KEY, EventStream, Web


@pytest.fixture
def told(web: Web) -> Web:
    tell_fleet(web)
    tell_hostile_node(web)
    web.post("/v1/network/nodes/register", {"alias": "registered", "address": "192.0.2.9:52051"})
    run = web.post(
        "/v1/network/benchmarks", {"kind": "at 192.0.2.9", "config": {"host": "192.0.2.8:1", "m": "telltale prompt"}}
    )
    stage = {
        "name": "remote_compute",
        "note": "telltale prompt",
        "digest": "deadbeefdeadbeef" * 4,
        "stop_reason": "192.0.2.7 died",
    }
    answer = web.call("PATCH", f"/v1/network/benchmarks/{run.json['id']}", {"stages": [stage]}, key=API_KEY)
    assert answer.status == 200
    return web


def public_texts(web: Web) -> dict[str, str]:
    """Every public answer, the live events among them."""
    run = web.get("/v1/network/benchmarks")[0]["id"]
    texts = {}
    for route in web.routes:
        if route.method == "GET" and route.access is Access.READ and not route.path.endswith("/events"):
            path = route.path.replace("<run_id>", run).replace("<name>", "index.html")
            answer = web.call("GET", path)
            assert answer.status == 200, path
            texts[path] = answer.text + str(answer.headers)
    for topic in TOPICS:
        with EventStream(web.server.address, f"/v1/network/events?topics={topic}") as stream:
            texts[f"events {topic}"] = str(stream.next(topic))
    texts["events once"] = web.call("GET", "/v1/network/events?once=true").text
    return texts


def test_no_public_answer_holds_a_tell_tale(told: Web) -> None:
    texts = public_texts(told)
    assert len(texts) > 35
    found = {(path, word) for path, text in texts.items() for word in PRIVATE if word in text}
    assert found == set()


def test_the_tell_tales_are_really_there_for_who_has_the_key(told: Web) -> None:
    run = told.get("/v1/network/benchmarks")[0]["id"]
    paths = [
        route.path.replace("<run_id>", run) for route in told.routes if route.method == "GET" and "<name>" not in route.path
    ]
    texts = "".join(told.call("GET", path, key=API_KEY).text for path in paths if not path.endswith(("/events", "/capture")))
    assert [word for word in PRIVATE if word not in texts and word != "2001:db8::77"] == []


def test_refusals_and_errors_do_not_repeat_what_was_sent(web: Web) -> None:
    for method, path in (
        ("GET", "/telltale%20prompt"),
        ("GET", "/v1/network/benchmarks/deadbeefdeadbeef"),
        ("POST", "/v1/network/groups"),
    ):
        answer = web.call(method, path, {"name": "telltale prompt"}, key="192.0.2.7")
        assert answer.status >= 400
        assert not any(word in answer.text for word in PRIVATE)


@given(st.text(alphabet=string.printable, max_size=80))
def test_a_label_is_short_and_has_no_dot_colon_slash_or_space(text: str) -> None:
    shown = label(text)
    assert len(shown) <= 32
    assert not set(shown) & set(" ./:@\\\n")


@given(st.text(min_size=1, max_size=80))
def test_a_reason_becomes_one_of_a_few_kinds_and_never_itself(text: str) -> None:
    assert reason_kind(text) in {kind for _, kind in REASONS} | {OTHER}


def test_names_of_unknown_nodes_and_options_are_not_shown() -> None:
    who = Eyes(admin=False, known={"worker-1"})
    assert (who.node("worker-1"), who.node("10.0.0.1:5"), who.node("")) == ("worker-1", OTHER, "")
    assert who.option("worker worker-1") == "worker worker-1"
    assert who.option("worker 10.0.0.1:5") == "worker other"
    assert who.option("wait for another session") == "wait for another session"
    assert who.option("stay with worker-1") == "stay with worker-1"
    assert who.option("rm -rf /") == OTHER
    assert Eyes(admin=True, known=()).option("rm -rf /") == "rm -rf /"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit"),
        ("/Users/me/models/gemma", "gemma"),
        ("~/models/gemma/", "gemma"),
        ("C:\\models\\gemma", "gemma"),
        ("./gemma", "gemma"),
    ],
)
def test_a_model_named_by_a_path_is_shown_by_its_last_part(text: str, shown: str) -> None:
    assert model_name(text) == shown


@pytest.mark.parametrize(
    "text", ["10.9.8.7:4444", "host:4444", "[fe80::1]:5", "what a prompt says", "/x/10.9.8.7:4444", "a//b"]
)
def test_what_is_no_name_of_a_model_is_not_shown(text: str) -> None:
    assert model_name(text) == OTHER


@given(st.text(max_size=70) | st.text("0123456789abcdef", max_size=70))
def test_an_identifier_is_shown_when_it_has_the_form_that_nodes_give_it(text: str) -> None:
    who, everything = Eyes(admin=False, known=()), Eyes(admin=True, known=())
    is_hex = set(text) <= set("0123456789abcdef")
    assert who.identifier(text) == (text if is_hex and len(text) in (0, 16, 32) else OTHER)
    assert who.fingerprint(text) == (text if is_hex and len(text) in (0, 64) else OTHER)
    assert everything.identifier(text) == everything.fingerprint(text) == text
