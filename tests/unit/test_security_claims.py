"""docs/security.md and docs/privacy.md name tests that exist, and the attacks that exist are named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from daemons.entitlement import NEW_BURST, NEW_OF_ALL_PER_S, NEW_PER_S, SAVE_INTERVAL_S
from kakeya_zmq.audit import (
    ENTRIES_BURST,
    ENTRIES_PER_S,
    FILE_BYTES_MAX,
    KINDS,
    OLD_FILES,
    REASON_BURST,
    REASON_PER_S,
    TOTAL_PER_S,
)
from kakeya_zmq.backoff import NEWCOMERS_PAUSE_S, PAUSE_FIRST_S, PAUSE_MAX_S
from kakeya_zmq.io.connections import UNPROVEN_MAX
from kakeya_zmq.protocol.emptying import GRACE_S, INTERVAL_S
from kakeya_zmq.protocol.identities import ACCOUNT_MAX, NODES_MAX
from kakeya_zmq.protocol.offload_seal import (
    NEWCOMER_PROVES_WITHIN_MAX_S,
    NEWCOMER_PROVES_WITHIN_S,
    PROVE_WITHIN_S,
    ROUND_TRIPS,
)
from kakeya_zmq.protocol.revocation import PER_ISSUER_MAX
from kakeya_zmq.protocol.revocation_room import UNMET_LEVELS
from kakeya_zmq.protocol.session_bounds import (
    HELLOS_BURST,
    KEY_HELLOS_BURST,
    KEY_HELLOS_PER_S,
    REGISTRATIONS_BURST,
    REGISTRATIONS_PER_S,
    SESSIONS_PER_KEY_MAX,
    UNPROVEN_HELLOS_BURST,
    UNPROVEN_HELLOS_PER_S,
    UNPROVEN_SESSIONS_MAX,
)
from wire import limits

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {name: (ROOT / "docs" / name).read_text("utf-8") for name in ("security.md", "privacy.md")}


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("name", TEXTS)
def test_every_named_test_exists(name: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXTS[name])
    assert named
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or test in names_in(ROOT / file), f"{file} has no {test}"


def test_every_attack_is_named() -> None:
    claims = {test for _, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXTS["security.md"])}
    for path in sorted((ROOT / "tests" / "attacks").glob("test_*.py")):
        attacks = {test for test in names_in(path) if not re.match(r"test_(the_second|a_proper)", test)}
        if path.name != "test_audit_command.py":
            assert attacks <= claims, f"{path.name}: not in docs/security.md: {attacks - claims}"


def test_the_audit_log_is_documented() -> None:
    documented = re.findall(r"^\| `(\w+)` \|", TEXTS["privacy.md"], flags=re.MULTILINE)
    assert documented == ["time", "kind", "reason", "count", "node_id", "suppressed"]
    assert all(f"`{kind}`" in TEXTS["privacy.md"] for kind in KINDS)


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"{UNPROVEN_MAX} are kept" in TEXTS["security.md"]
    assert f"longer than {limits.HANDSHAKE_INTERVAL_MS // 1000} s" in TEXTS["security.md"]
    assert f"{ENTRIES_BURST:.0f} entries are written at once" in TEXTS["privacy.md"]
    assert f"of one kind and reason {REASON_BURST:.0f} and then one a second" in " ".join(TEXTS["privacy.md"].split())
    assert (1 / ENTRIES_PER_S, REASON_PER_S, TOTAL_PER_S, OLD_FILES, FILE_BYTES_MAX) == (5, 1, 5, 3, 1 << 20)
    protocol = " ".join((ROOT / "docs" / "protocol.md").read_text("utf-8").split())
    rates = (
        f"({HELLOS_BURST:.0f}, then one a second)",
        f"({KEY_HELLOS_BURST:.0f}, then {KEY_HELLOS_PER_S:.0f} a second)",
        f"({REGISTRATIONS_BURST:.0f}, then {REGISTRATIONS_PER_S:.0f} a second)",
        f"({UNPROVEN_HELLOS_BURST:,.0f}, then {UNPROVEN_HELLOS_PER_S:.0f} a second)",
        f"those that wait for it {UNPROVEN_SESSIONS_MAX} are kept",
    )
    assert all(rate in protocol for rate in rates)
    assert f"{SESSIONS_PER_KEY_MAX} sessions of one identity key" in protocol
    assert f"more than {UNPROVEN_MAX} of them" in protocol
    assert f"when {GRACE_S:.0f} s have passed, but never twice within {INTERVAL_S:.0f} s" in protocol
    assert f"for {PAUSE_FIRST_S:.0f} s, twice as long each time, at most {PAUSE_MAX_S:.0f} s" in protocol
    security = " ".join(TEXTS["security.md"].split())
    assert f"or for {PROVE_WITHIN_S:.0f} s. Of a cache peer's place" in security
    assert (NEWCOMER_PROVES_WITHIN_S, ROUND_TRIPS, NEWCOMER_PROVES_WITHIN_MAX_S) == (1.0, 4, 3.0)
    pauses = f"for {PAUSE_FIRST_S:.0f} to {PAUSE_MAX_S:.0f} s, and all of his kind for {NEWCOMERS_PAUSE_S:.0f} s"
    assert pauses in security
    rates = f"{NEW_BURST:.0f} are looked at, then {NEW_PER_S:.0f} a second, of all together {NEW_OF_ALL_PER_S:.0f} a second"
    assert rates in security
    assert f"the file is written once in {SAVE_INTERVAL_S:.0f} s" in security
    assert UNMET_LEVELS == 8  # docs/decisions/0023
    assert f"({NODES_MAX:,})" in protocol
    assert f"at most {ACCOUNT_MAX} newcomers" in protocol
    assert f"the {PER_ISSUER_MAX} earliest of its issuer" in protocol
    assert f"{limits.REVOCATIONS_MAX:,} are kept" in protocol
    assert f"{limits.SESSIONS_MAX:,} altogether" in protocol
