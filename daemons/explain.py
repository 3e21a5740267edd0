"""``kakeya explain`` and ``kakeya kvfs``: where the KV of requests came from, and where KV is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from daemons.console import Console
from kakeya_zmq.client import Client
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.bus_subscriber import Subscriber
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.kvfs import NamespaceView, namespaces
from wire.bus import BusMessage, Topic
from wire.errors import FailureCode, RemoteProtocolError, RequestFailed
from wire.events import RequestEvent, SourceView, decode_event
from wire.keys import FleetKey
from wire.limits import REQUEST_RECORDS_MAX

CONNECT_TIMEOUT_SECONDS = 3.0
FOLLOWED_MAX = 4096
"""Records remembered to tell which are new: they are told again to every reader that joins."""
_SOURCES = {
    "computed": "computed here",
    "hot": "own cache",
    "remote_cache": "cache of",
    "worker": "prefill by",
    "live": "session",
}


def explain(console: Console, address: Address, psk_file: Path, *, count: int, follow: bool) -> int:
    """Show the last requests of a primary, then, with ``follow``, new ones until interrupted.

    Returns:
        0.

    Raises:
        InvalidInput: ``count`` is out of range.
        RequestFailed: the primary does not answer, or the node is none.
        SecretFileError: the PSK file cannot be used.
    """
    with Client(str(address), psk_file=psk_file, connect_timeout_s=CONNECT_TIMEOUT_SECONDS) as client:
        records = client.requests(count)
        if follow:
            known = client.requests(REQUEST_RECORDS_MAX)
            bus_port = client.status().sections["node"]["bus_port"]
            peer = client.peer
    if follow:
        former = {record.request_id: None for record in known if record not in records}
        bus = Address(address.host, int(bus_port or 0))
        # The node that has just answered, and nobody else who may speak on that bus.
        _follow(console, bus, psk_file, peer.identity_public_key if peer is not None else b"", records, former)
        return 0
    for record in records:
        _show(console, record)
    if not records:
        console.say("no request has ended here yet")
    if console.json_mode:
        console.result({"requests": [as_dict(record) for record in records]})
    return 0


def _follow(
    console: Console,
    bus: Address,
    psk_file: Path,
    identity_public_key: bytes,
    records: tuple[RequestEvent, ...],
    seen: dict[str, None],
) -> None:
    """Show each record once, as it comes over the bus: with --json one object a line.

    Args:
        identity_public_key: of the node whose records are wanted: only what it has signed is shown.
        records: shown first.
        seen: ids of others that are not shown: the node tells them again to every reader that joins.
    """

    def show(record: RequestEvent) -> None:
        if record.request_id in seen:
            return
        seen[record.request_id] = None
        if len(seen) > FOLLOWED_MAX:
            del seen[next(iter(seen))]
        if console.json_mode:
            console.result(as_dict(record))
        else:
            _show(console, record)

    def admit(node_id: str, public_key: bytes) -> str:
        return "" if public_key == identity_public_key else "another node"

    def heard(message: BusMessage) -> None:
        try:
            event = decode_event(message.topic, message.payload)
        except RemoteProtocolError:  # of a newer version that we cannot read
            return
        if isinstance(event, RequestEvent):
            try:
                show(event)
            except BrokenPipeError as error:  # the reader of our output went away: the loop would go on for ever
                ended.append(error)
                reactor.stop()

    for record in records:
        show(record)
    reactor = Reactor()
    ended: list[BrokenPipeError] = []
    try:
        keys = FleetKey.load(psk_file)
        subscriber = Subscriber(reactor, keys=keys, topics=[Topic.REQUEST], on_message=heard, admit=admit)
        subscriber.connect(bus)
        reactor.run()
    finally:
        reactor.close()
    if ended:
        raise ended[0]
    if reactor.interrupted:
        raise KeyboardInterrupt


def as_dict(record: RequestEvent) -> dict[str, Any]:
    """A record with all of its fields, for ``--json``."""
    return {name: msgspec.to_builtins(getattr(record, name)) for name in record.__struct_fields__}


def request_lines(record: RequestEvent) -> list[str]:
    """A record for people: what happened, and indented below it why."""
    if record.operation == "generate":
        text = f"answer: {record.generated_tokens} tokens in {record.elapsed_ms:.0f} ms"
        if record.decode_tokens_per_second:
            text += f", {record.decode_tokens_per_second:.1f} tokens/s"
        if record.ttft_ms:
            text += f", first token after {record.ttft_ms:.0f} ms"
        text += f" ({record.stop_reason.replace('_', ' ') or record.outcome})"
    else:
        text = f"prompt of {record.prompt_tokens} tokens: {record.outcome} in {record.elapsed_ms:.0f} ms"
        if record.prompt_tokens:
            text += f", {record.boundary} not computed here"
        if record.transfer_bytes:
            text += f", {record.transfer_bytes / 1e6:.1f} MB moved"
    lines = [text, *(f"  {_source_text(source)}" for source in record.sources)]
    for decision in record.decisions:
        costs = ", ".join(f"{name} {cost:.0f} ms" for name, cost in decision.costs_ms.items())
        why = costs or decision.text
        lines.append(f"  {decision.what}: {decision.chosen or 'none'}{f' ({why})' if why else ''}")
    if record.diverged_at is not None:
        lines.append(f"  differs from everything cached from token {record.diverged_at} on")
    return [*lines, *(f"  {reason}" for reason in record.reasons)]


def _source_text(source: SourceView) -> str:
    name = _SOURCES.get(source.kind, source.kind)
    text = f"[{source.start}, {source.end}) {name}" if source.end > source.start else f"besides: {name}"
    if source.node_id:
        text += f" {source.node_id}"
    if source.transfer_bytes:
        text += f", {source.transfer_bytes / 1e6:.1f} MB"
    return f"{text}, {source.elapsed_ms:.0f} ms" if source.elapsed_ms else text


def _show(console: Console, record: RequestEvent) -> None:
    for line in request_lines(record):
        console.say(line)
    sys.stdout.flush()


# --- kvfs --------------------------------------------------------------------------------------------------------------


def show_kvfs(console: Console, address: Address, psk_file: Path) -> int:
    """Show the fleet's KV as a tree of names, as the node at ``address`` knows it.

    Returns:
        0.

    Raises:
        RequestFailed: the node does not answer.
        SecretFileError: the PSK file cannot be used.
    """
    with Client(str(address), psk_file=psk_file, connect_timeout_s=CONNECT_TIMEOUT_SECONDS) as client:
        try:
            views = namespaces(client.cards())
        except RemoteProtocolError as error:
            raise RequestFailed(FailureCode.INTERNAL, f"the node's cards cannot be read: {error}") from error
    for view in views:
        _show_namespace(console, view)
    if not views:
        console.say("no node runs a model or holds KV")
    if console.json_mode:
        console.result({"namespaces": views})
    return 0


def _show_namespace(console: Console, view: NamespaceView) -> None:
    console.say(view["uri"])
    console.say(
        f"  {view['bytes_used'] / 1e6:.1f} MB in {len(view['mounts'])} stores, {view['bytes_free'] / 1e6:.0f} MB free"
    )
    rows = [
        (
            mount["node_id"],
            mount["tier"],
            f"{mount['bytes_used'] / 1e6:.1f}",
            f"{mount['bytes_free'] / 1e6:.0f}",
            mount["address"],
        )
        for mount in view["mounts"]
    ]
    if rows:
        console.table("", ("node", "tier", "MB held", "MB free", "address"), rows)
