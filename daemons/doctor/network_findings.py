"""What is wrong with the fleet, judged from what its nodes told: pure functions."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import Final

from daemons.doctor.finding import Finding, ok, problem, warning
from daemons.doctor.network import MACOS_NO_ROUTE, NodeView, Reach
from daemons.fleet import Member
from kakeya_zmq.compat import TENANT_KEY_ID, Compatibility
from kakeya_zmq.decode_worker.values import WorkerState
from kakeya_zmq.io.connections import REFUSED_WRONG_PSK

SKEW_WARNING_MS: Final = 5_000.0
ROUND_TRIP_WARNING_MS: Final[dict[str, float]] = {"thunderbolt": 5.0, "lan": 20.0, "tailscale": 200.0, "public": 500.0}
SLOW_LINK_MB_S: Final[dict[str, float]] = {"thunderbolt": 200.0, "lan": 20.0}
LOCAL_NETWORK: Final = (
    "grant this Python Local Network access: System Settings, Privacy & Security, Local Network; then start the daemon again"
)
CONNECTED: Final = "up"


def judge_reach(address: str, seen: Reach, platform: str = sys.platform) -> Finding | None:
    """Why no TCP connection came about; None when it did."""
    if seen.error == 0:
        return None
    if seen.error in (errno.EHOSTUNREACH, MACOS_NO_ROUTE):
        if platform == "darwin" and seen.others_connect is not False:
            others = "other programs connect" if seen.others_connect else "errno 65"
            return problem("reach", f"macOS keeps this Python from reaching {address} ({others})", LOCAL_NETWORK)
        return problem("reach", f"there is no route to {address}", "check the cable, the network and the address")
    if seen.error == errno.ECONNREFUSED:
        remedy = "start the node there, and see that it binds more than 127.0.0.1 (--bind 0.0.0.0:PORT)"
        return problem("reach", f"nothing listens at {address}", remedy)
    if seen.error == errno.ETIMEDOUT:
        return problem("reach", f"{address} does not answer", "is the machine awake, and does its firewall let the port in?")
    if seen.error == errno.ENOENT:
        return problem("reach", f"the name in {address} is not known", "check the spelling, or write an IP address")
    return problem("reach", f"{address} cannot be reached: {os.strerror(seen.error)}", "check the address and the network")


def judge_wrong_key(addresses: Sequence[str]) -> Finding:
    """Nodes that do not take our fleet key: mostly it is ours that is wrong, so all of them are one fault."""
    *others, last = addresses
    text = f"{', '.join(others)} and {last} have another fleet key" if others else f"{last} has another fleet key"
    remedy = "copy fleet.psk from that machine (scp -p); `kakeya key show` tells the key ids"
    return problem("keys", text, remedy)


def judge_refusal(address: str) -> Finding:
    """Something listens, and the conversation did not come about."""
    text = f"something listens at {address} and does not answer as a node"
    return problem("reach", text, "is it a kakeya node of the same version? `kakeya logs` there tells more")


def judge_nodes(views: Sequence[NodeView], ended: Sequence[Member] = ()) -> Iterator[Finding]:
    """Everything that one can tell from the nodes that answered.

    Args:
        ended: nodes of this machine that are known to be gone: it is nobody's fault that they are not reached.
    """
    gone = {(member.node_id, _port(member.address)) for member in ended}
    for view in views:
        yield _state(view)
        yield from _memory(view)
        yield from _decode_worker(view)
        yield from _clocks(view)
        yield from _links(view, gone)
        yield from _refusals(view)
    yield from _one_way(views)
    yield from _namespaces(views)
    yield from _versions(views)


def _state(view: NodeView) -> Finding:
    state = str(view.sections.get("node", {}).get("state", ""))
    text = f"{view.node_id}: {state}, answers in {view.round_trip_ms:.1f} ms"
    if state in ("draining", "stopping"):
        return warning("nodes", text, "wait until it has been started again")
    return ok("nodes", text)


def _memory(view: NodeView) -> Iterator[Finding]:
    level = view.sections.get("memory", {}).get("level", "ok")
    remedy = "close sessions, lower --cache-gb or --capacity, or raise --memory-drain-gb"
    if level in ("drain", "unhealthy"):
        yield problem("memory", f"{view.node_id} takes no new work: its memory is nearly full ({level})", remedy)
    elif level == "warning":
        yield warning("memory", f"memory of {view.node_id} is getting full", remedy)


def _decode_worker(view: NodeView) -> Iterator[Finding]:
    child = view.sections.get("decode_worker", {})
    if child.get("state") == WorkerState.GIVEN_UP.value:
        text = f"{view.node_id} answers no prompt: its decode worker was lost too often"
        remedy = "kakeya logs there tells what killed it; a model that does not fit in memory is the usual reason"
        yield problem("decode", text, remedy)
    elif child.get("restarts"):
        text = f"the decode worker of {view.node_id} was lost and replaced, restarts: {child['restarts']}"
        yield warning("decode", text, "kakeya logs there tells what killed it")


def _clocks(view: NodeView) -> Iterator[Finding]:
    for name, row in sorted(view.peers.items()):
        skew_ms = row.get("clock_skew_ms")
        if isinstance(skew_ms, int | float) and abs(skew_ms) >= SKEW_WARNING_MS:
            way = "ahead of" if skew_ms > 0 else "behind"
            text = f"the clock of {name} is {abs(skew_ms) / 1000:.0f} s {way} that of {view.node_id}"
            yield warning("clocks", text, "let both machines set their clocks by the network (NTP)")


def _port(address: str) -> str:
    """One process has it at every address of its machine."""
    return address.rpartition(":")[2]


def _links(view: NodeView, gone: Collection[tuple[str, str]]) -> Iterator[Finding]:
    for name, row in sorted(view.peers.items()):
        state, error = str(row.get("state", "")), str(row.get("error") or "")
        if state != CONNECTED and (name, _port(str(row.get("address", "")))) in gone:
            continue
        if error and state != CONNECTED:
            remedy = (
                LOCAL_NETWORK if str(MACOS_NO_ROUTE) in error else f"run `kakeya doctor` on the machine of {view.node_id}"
            )
            yield problem("links", f"{view.node_id} does not reach {name}: {error}", remedy)
            continue
        network, round_trip_ms = str(row.get("network") or ""), row.get("round_trip_ms")
        rate = view.links.get(name)
        told = f"{view.node_id} to {name}"
        if isinstance(round_trip_ms, int | float):
            told += f": {round_trip_ms:.2f} ms"
            if round_trip_ms > ROUND_TRIP_WARNING_MS.get(network, float("inf")):
                remedy = f"is it really on {network}? see --network, --endpoint, and power saving of the network"
                yield warning("links", f"{told} is slow for {network}", remedy)
                continue
        if rate is not None:
            told += f", {rate:.0f} MB/s in the last transfers"
            if rate < SLOW_LINK_MB_S.get(network, 0.0):
                remedy = "prefer a faster network (--endpoint), or compress on it (--link-compression)"
                yield warning("links", f"{told} is slow for {network}", remedy)
                continue
        if state == CONNECTED:
            yield ok("links", told)


def _refusals(view: NodeView) -> Iterator[Finding]:
    count = view.sections.get("refusals", {}).get(REFUSED_WRONG_PSK)
    if isinstance(count, int) and count > 0:
        text = f"{view.node_id} has refused connections with another fleet key since its start: {count}"
        remedy = "if a node of yours is missing, copy fleet.psk to its machine (scp -p); `kakeya key show` tells the key ids"
        yield warning("keys", text, remedy)


def _one_way(views: Sequence[NodeView]) -> Iterator[Finding]:
    for one, other in itertools.permutations(views, 2):
        there, back = one.peers.get(other.node_id), other.peers.get(one.node_id)
        tried = back is not None and (back.get("error") or back.get("state") in ("connecting", "down"))
        if there is not None and there.get("state") == CONNECTED and tried:
            text = f"{one.node_id} reaches {other.node_id}, but not the other way round"
            remedy = f"check --advertise of {one.node_id} and its firewall; on macOS: {LOCAL_NETWORK}"
            yield problem("reach", text, remedy)


def compatibility_of(view: NodeView) -> Compatibility | None:
    """The namespace of a node with a model, as it tells; None when it does not (a cache peer, or another version)."""
    section = view.sections.get("compatibility", {})
    names = [field.name for field in fields(Compatibility)]
    if not all(name in section for name in names):
        return None
    return Compatibility(**{name: section[name] for name in names})


def _namespaces(views: Sequence[NodeView]) -> Iterator[Finding]:
    with_model = [(view, found) for view in views if (found := compatibility_of(view)) is not None]
    for (one, ours), (other, theirs) in itertools.combinations(with_model, 2):
        names = list(ours.differences(theirs))
        ids = [view.sections["compatibility"].get(TENANT_KEY_ID) for view in (one, other)]
        if ids[0] != ids[1]:
            names.append(TENANT_KEY_ID)
        if not names:
            yield ok("namespace", f"{one.node_id} and {other.node_id} can use each other's KV")
            continue
        text = f"{one.node_id} and {other.node_id} cannot use each other's KV: {', '.join(names)} differ"
        text += "s" if len(names) == 1 else ""
        yield problem("namespace", text, _namespace_remedy(names))


def _namespace_remedy(names: Sequence[str]) -> str:
    remedies = {
        TENANT_KEY_ID: "copy tenants/NAME.key from the primary (scp -p)",
        "tenant_namespace": "set the same --tenant-id",
        "model_id": "set the same --model-id, or name the model folders alike",
        "block_size_tokens": "set the same --cache-block-tokens",
        "cache_format_version": "set the same --cache-compression, and run the same version of kakeya",
        "sink_size": "set the same --kv-policy, --sink and --window",
        "window_size": "set the same --kv-policy, --sink and --window",
    }
    return next((remedies[name] for name in names if name in remedies), "copy the same model folder to both machines")


def _versions(views: Sequence[NodeView]) -> Iterator[Finding]:
    versions = sorted({view.software for view in views if view.software})
    if len(versions) > 1:
        text = f"nodes run different versions: {', '.join(versions)}"
        yield warning("versions", text, "finish the upgrade; nodes of different formats do not share KV meanwhile")
