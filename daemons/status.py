"""``kakeya status``: ask nodes what they are doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from daemons import fleet
from daemons.bus_note import nodes_here
from daemons.console import Console, command_name
from kakeya_zmq.client import Client
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.decode_worker.values import WorkerState
from wire.errors import FailureCode, RequestFailed
from wire.messages import Status

CONNECT_TIMEOUT_SECONDS = 3.0
GIVEN_UP = WorkerState.GIVEN_UP.value
PREFILL_FIGURES = (
    "local_hits",
    "remote_hits",
    "remote_jobs",
    "remote_job_failures",
    "tokens_reused",
    "tokens_computed",
    "fallbacks",
    "publish_successes",
    "publish_failures",
)


def show_status(console: Console, addresses: tuple[str, ...], psk_file: Path) -> int:
    """Show the given nodes, or those of this machine: the local fleet, and what was started otherwise.

    Returns:
        0 when every node answered, 3 when one did not or nothing runs, 4 when a key was not accepted.

    Raises:
        SecretFileError: the PSK file cannot be used.
        ConfigError: the notes of `kakeya up` cannot be used, and no address was given.
    """
    members = {member.address: member for member in ([] if addresses else fleet.load_fleet())}
    targets = addresses or tuple(dict.fromkeys((*members, *nodes_here(kakeya_home()))))
    if not targets:
        console.say(f"no node is running here; start a fleet with `{command_name()} up`, or name a node with --address")
        if console.json_mode:
            console.result({"nodes": []})
        return 3
    code = 0
    answers: list[dict[str, Any]] = []
    for address in targets:
        try:
            status = _ask(address, psk_file)
        except RequestFailed as error:
            code = max(code, 4 if error.code is FailureCode.UNAUTHENTICATED else 3)
            member = members.get(address)
            where = f"{member.role} at {address}" if member else address
            stopped = " (its process has ended; see its log)" if member and not member.alive else ""
            console.say(f"{where}: {error}{stopped}")
            answers.append({"address": address, "error": str(error)})
            continue
        answers.append({"address": address, **status_as_dict(status)})
        _show(console, address, status)
    if console.json_mode:
        console.result({"nodes": answers})
    return code


def status_as_dict(status: Status) -> dict[str, Any]:
    """A node's status with names, for ``--json``."""
    return {field: msgspec.to_builtins(getattr(status, field)) for field in status.__struct_fields__}


def _ask(address: str, psk_file: Path) -> Status:
    with Client(address, psk_file=psk_file, connect_timeout_s=CONNECT_TIMEOUT_SECONDS) as client:
        return client.status()


def _show(console: Console, address: str, status: Status) -> None:
    node = status.sections.get("node", {})
    cache = status.sections.get("cache", {})
    console.say("")
    console.say(
        f"{status.node_id} ({', '.join(status.roles)}) at {address}: {node.get('state')}, up {_figure(node, 'uptime_s')} s"
    )
    used, limit = _figure(cache, "bytes_used"), _figure(cache, "max_bytes")
    console.say(
        f"  cache    {used / 1e6:.1f} of {limit / 1e6:.0f} MB in {_figure(cache, 'entry_count')} parts, "
        f"{_figure(cache, 'evictions')} evictions"
    )
    prefill = status.sections.get("prefill", {})
    told = [f"{name.replace('_', ' ')} {prefill[name]}" for name in PREFILL_FIGURES if prefill.get(name)]
    if told:
        console.say(f"  prefill  {', '.join(told)}")
    if prefill.get("last_fallback_reason"):
        console.say(f"  last fallback  {prefill['last_fallback_reason']}")
    child = status.sections.get("decode_worker", {})
    if child:
        given_up = " — it was lost too often, and no prompt is answered now" if child.get("state") == GIVEN_UP else ""
        console.say(
            f"  decode worker  {child.get('state')}, process {_figure(child, 'pid'):.0f}, "
            f"restarts {_figure(child, 'restarts'):.0f}, hangs {_figure(child, 'hangs'):.0f}{given_up}"
        )
    for row in status.peers:
        trip = f", {row['round_trip_ms']} ms" if row.get("round_trip_ms") is not None else ""
        error = f" — {row['error']}" if row.get("error") else ""
        console.say(f"  peer     {row.get('node_id') or row.get('address')}: {row.get('state')}{trip}{error}")
    if left_out := _figure(status.sections.get("node", {}), "peers_left_out"):
        console.say(f"  peers    {left_out:.0f} more, which do not fit into one answer")
    for line in status.recent[-5:]:
        console.say(f"  event    {line}")


def _figure(section: dict[str, Any], name: str) -> float:
    value = section.get(name)
    return value if isinstance(value, int | float) else 0
