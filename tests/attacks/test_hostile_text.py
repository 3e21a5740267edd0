"""A member whose names and texts are meant for the terminal of whoever looks: each command shows them, none obeys them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from tests.attacks.kit import Siege
from tests.attacks.rogue_member import FAILURE, REPLY, RogueMember
from tests.fleet_rig import Fleet, run_kakeya, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity

STEERING: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n2026-01-01 00:00:00 ERROR forged\u202etxt\u2066\u200b\u2028\x7f"
MARKUP: Final = "[red]r[/red] [link=http://x]l[/link] :warning: [/]"
TEXT: Final = STEERING + MARKUP
SHOWN: Final = r"\x1b]0;owned\x07\x1b[2J"
EXCHANGE: Final = 1
PLAIN_NAME: Final = "rogue"


def card_of(who: Identity, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "node_id": who.node_id,
        "identity_public_key": who.public,
        "incarnation": time.time_ns(),
        "sequence": 1,
        "roles": ["cache", "primary"],
        "software": "independent",
        "platform": "",
        "memory_bytes": 0,
        "endpoints": [["127.0.0.1:9", "lan", 50, b""]],
        "bus_port": 0,
        "models": [[MARKUP, "primary", "none", 0.0, b"f" * 32, "default", {}]],
        "cache": [1, 1, 1, 1, 0.0, 0, 0, 0, 0, [], [[b"f" * 32, 1]]],
        "worker": None,
        "announced_at_unix": time.time(),
        "ttl_ms": 60_000,
    }
    return wire.sign_card(who.signing, list({**fields, **changes}.values()))


def record() -> dict[str, Any]:
    """A request of a primary, as it travels: the names are as bad as their grammar lets them be."""
    return {
        "request_id": "r",
        "operation": "append",
        "outcome": MARKUP,
        "prompt_tokens": 5,
        "sources": [{"kind": MARKUP, "start": 0, "end": 5, "node_id": MARKUP}],
        "decisions": [{"what": MARKUP, "chosen": MARKUP, "costs_ms": {TEXT: 1.0}, "text": TEXT}],
        "reasons": [TEXT],
    }


def status(node_id: str) -> list[Any]:
    figures: dict[str, Any] = {"state": TEXT, "uptime_s": 1.0, "software": TEXT, "bus_port": 0}
    sections = {
        "node": figures,
        "memory": {"level": TEXT},
        "prefill": {"last_fallback_reason": TEXT},
        "refusals": {TEXT: 1},
    }
    peer = {"node_id": TEXT, "state": TEXT, "error": TEXT, "round_trip_ms": TEXT, "network": TEXT}
    return [111, node_id, ["primary"], sections, [peer], [TEXT]]


def talkative(who: Identity) -> Callable[[list[Any]], list[Any]]:
    def answer(body: list[Any]) -> list[Any]:
        match body[0]:
            case 1:
                return [REPLY, [101, [card_of(who)], [0], b"", False, [], b""]]
            case 12:
                return [REPLY, status(who.node_id)]
            case 13:
                return [REPLY, [112, [msgpack.packb(record())]]]
        return [FAILURE, 4, TEXT]

    return answer


def refusing(body: list[Any]) -> list[Any]:
    return [FAILURE, 4, TEXT]


def run(fleet: Fleet, *arguments: str) -> str:
    """What a command says, both ways; nothing of it steers, hides, or is read as markup."""
    done = run_kakeya(*arguments, home=fleet.home)
    said = done.stdout + done.stderr  # in this order, so that the object of --json is the first line
    assert all(each == "\n" or each.isprintable() for each in said), f"{arguments}: {said!r}"
    assert not any(line.startswith("2026-01-01 00:00:00 ERROR forged") for line in said.splitlines())
    return said


@pytest.fixture
def rogue(siege: Siege) -> Callable[..., RogueMember]:
    who = Identity.new(PLAIN_NAME)

    def make(answer: Callable[[list[Any]], list[Any]] | None = None, **options: Any) -> RogueMember:
        return RogueMember(siege.psk, who, answer or talkative(who), **options)

    return make


def test_commands_that_ask_it(fleet: Fleet, rogue: Callable[..., RogueMember]) -> None:
    with rogue() as member:
        asked = ("--address", member.address)
        said = run(fleet, "status", *asked)
        assert SHOWN in said
        assert MARKUP in said
        shown = json.loads(run(fleet, "status", *asked, "--json").splitlines()[0])
        assert shown["nodes"][0]["recent"] == [TEXT], "JSON loses nothing"
        said = run(fleet, "explain", *asked)
        assert SHOWN in said
        assert f"{MARKUP}: {MARKUP} (" in said
        assert "default/%5Bred%5Dr" in run(fleet, "kvfs", *asked)
        run(fleet, "doctor", "--quick", *asked)
        run(fleet, "doctor", "--quick", "--json", *asked)


def test_its_errors(fleet: Fleet, rogue: Callable[..., RogueMember]) -> None:
    with rogue(refusing) as member:
        for command in (("status",), ("explain",), ("kvfs",), ("doctor", "--quick")):
            said = run(fleet, *command, "--address", member.address)
            assert command[0] == "doctor" or SHOWN in said


def test_a_server_whose_name_breaks_the_grammar_is_no_node(siege: Siege, fleet: Fleet) -> None:
    with RogueMember(siege.psk, Identity.new("rogue\x1b[2J"), talkative(Identity.new(PLAIN_NAME))) as member:
        assert "rogue" not in run(fleet, "status", "--address", member.address)


def test_a_client_whose_name_breaks_the_grammar_does_not_get_in(siege: Siege) -> None:
    names = ("a\x1b[2J", "two\nlines", "w\u043erker", "[red]", ".hidden", "n" * 101)
    with siege.expect("malformed hello", count=2 * len(names)):
        for name in names:
            with siege.client() as client:
                client.send(*client.hello(Identity.new(name))[0])
                client.send(*client.hello(Identity.new("fine"), roles=("[red]",))[0])
    told = str(siege.status()) + str(siege.audited("registered"))
    assert not any(repr(name)[1:-1] in told for name in names)


def test_what_a_daemon_writes_down_of_it(siege: Siege, fleet: Fleet, rogue: Callable[..., RogueMember]) -> None:
    """A real daemon has it as a peer: its log, its status, its audit file, and what the commands show of them."""
    with rogue() as member, siege.client() as client:
        session = client.join(member.who, roles=("cache",))
        card = card_of(member.who, endpoints=[[member.address, "lan", 50, b""]])
        client.ask(session, [EXCHANGE, [card], [0]])
        client.send(*session.seal([1, 2, 1000, [EXCHANGE, [card_of(member.who, node_id=TEXT)], [0]]]))
        wait_until(lambda: PLAIN_NAME in str(siege.status().peers), "it is a peer")
        client.send(*session.seal([9, TEXT, 0, 0]))  # a goodbye, with its reason
        name = siege.node.name
        for command in (("status", "--address", siege.address), ("audit",), ("audit", "--json"), ("logs", name)):
            run(fleet, *command)
    assert all(line.isprintable() for line in siege.status().recent)
    files = [*(fleet.home / "logs").iterdir(), *fleet.home.rglob("audit*.jsonl")]
    assert files
    for path in files:
        assert_clean(path)


def assert_clean(path: Path) -> None:
    written = path.read_text("utf-8")
    assert all(each == "\n" or each.isprintable() for each in written), path
    assert not re.search(r"^2026-01-01 00:00:00 ERROR", written, flags=re.MULTILINE), path


def test_the_terminal_monitor(fleet: Fleet, rogue: Callable[..., RogueMember]) -> None:
    snapshot = {
        "roles": ["primary"],
        "state": MARKUP,
        "models": [{"model_id": MARKUP, "tenant": "default"}],
        "sections": {"node": {"state": TEXT}},
        "ttl_ms": 60_000,
    }
    told = (
        (0x42, snapshot),
        (0x41, {"job_id": "j", "state": "running", "asker": MARKUP, "tokens_total": 9, "reason": TEXT}),
        (0x43, record()),
        (0x44, {"direction": "in", "peer": MARKUP, "ok": False, "reason": TEXT}),
        (0x46, {"kind": "card_refused", "text": TEXT}),
        (0x47, {"level": "error", "text": TEXT}),
    )
    with rogue(events=told) as member:
        bus = ("--bus", member.bus_address)
        said = run(fleet, "top", "--once", "--size", "200x60", *bus)
        assert PLAIN_NAME in said
        assert "?]0;owned??[2J" in said
        assert "[red]r[/red]" in said
        lines = run(fleet, "top", "--once", "--json", *bus).splitlines()
        assert any(json.loads(line).get("event", {}).get("text") == TEXT for line in lines)
