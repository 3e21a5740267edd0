"""A small synchronous client of a primary: no model, no MLX, no asyncio.

    >>> from pathlib import Path
    >>> from kakeya_zmq.client import Client
    >>> with Client("127.0.0.1:51051", psk_file=Path.home() / ".kakeya/fleet.psk") as client:   # doctest: +SKIP
    ...     with client.create_session(label="example") as session:
    ...         appended = session.append([2, 651, 5778, 576])
    ...         for token in session.generate(max_tokens=32):
    ...             print(token)
    ...         print(session.last_generated.stop_reason, appended.explanation.elapsed_ms)

The connection lives on a thread of its own; every method may be called from any thread and waits for its answer.
KeyboardInterrupt reaches the waiting caller at once, and the request it waited for is cancelled on the primary.

Errors: :class:`InvalidInput` for what can be seen to be wrong before it is sent, :class:`RequestFailed` for everything the
primary or the network answers instead of a result, :class:`SecretFileError` for the PSK file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kakeya_zmq.client_connection import Connection
from kakeya_zmq.client_session import CALL_TIMEOUT_S, Session, check_token_ids
from kakeya_zmq.io.addresses import parse_address
from kakeya_zmq.io.control_client import Keys
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from wire import limits
from wire.bus import Topic
from wire.cards import Card, mark_of, open_card, pack_digest
from wire.errors import ConfigError, InvalidInput
from wire.events import RequestEvent, decode_event
from wire.keyring import KeyFile
from wire.keys import FleetKey, NodeIdentity
from wire.messages import (
    CardList,
    CreateSession,
    ExchangeCards,
    GetRequests,
    GetStatus,
    PrefillPolicy,
    Requests,
    SessionCreated,
    Status,
)
from wire.text import NODE_ID_CHARACTERS_MAX, is_line, is_node_id

__all__ = ["Client", "Session"]

SOFTWARE: Final = "kakeya-client"
_ROLES: Final = ("client",)


class Client:
    """A connection to one primary.

    Args:
        address: ``host:port`` of the primary.
        fleet_key: the fleet's key, or
        psk_file: the file that holds it.
        node_id: name of this client in the fleet; a random one by default.
        identity: key of this client; a new one by default. With ``node_id`` and key of a listed node it comes in where a
            roster lets no clients in.
        connect_timeout_s: how long the primary may take to answer the first time.

    Raises:
        ConfigError: the address or ``node_id`` is malformed, or not exactly one of ``fleet_key`` and ``psk_file`` is given.
        SecretFileError: the PSK file cannot be used.
        RequestFailed: UNAVAILABLE, nothing answers in time; UNAUTHENTICATED, the PSK is not the primary's.
    """

    def __init__(
        self,
        address: str,
        *,
        fleet_key: FleetKey | None = None,
        psk_file: Path | None = None,
        node_id: str | None = None,
        identity: NodeIdentity | None = None,
        connect_timeout_s: float = 5.0,
    ) -> None:
        if (fleet_key is None) == (psk_file is None):
            raise ConfigError("a client needs exactly one of fleet_key and psk_file")
        keys: FleetKey | Keys = fleet_key if fleet_key is not None else KeyFile(_given(psk_file)).valid_keys
        if node_id is not None and not is_node_id(node_id):
            raise ConfigError(f"a node name has 1 to {NODE_ID_CHARACTERS_MAX} letters, digits, '-', '_' and '.'")
        server = parse_address(address)
        local = LocalNode(
            node_id=node_id or f"client-{secrets.token_hex(6)}",
            identity=identity or NodeIdentity.generate(),
            roles=_ROLES,
            # The first one of a node: its process, which may be connected there, too, is not taken for one that has ended.
            incarnation=0 if identity is not None else time.time_ns() // 1000,
            software=SOFTWARE,
        )
        self._connection = Connection(server, keys, local, connect_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def peer(self) -> PeerInfo | None:
        """The primary, None while the connection is down."""
        return self._connection.peer

    def create_session(
        self,
        eos_token_ids: Iterable[int] = (),
        label: str = "",
        policy: PrefillPolicy | None = None,
        use_local_cache: bool = True,
        publish: bool = True,
        exclude_nodes: Iterable[str] = (),
    ) -> Session:
        """Open an inference session (what the options mean: :class:`wire.messages.CreateSession`).

        Raises:
            InvalidInput: a token id is negative or above int32, or a name is too long or not one visible line.
            RequestFailed: the primary refused.
        """
        eos = tuple(check_token_ids(eos_token_ids))
        excluded = tuple(exclude_nodes)
        if not all(map(is_node_id, excluded)):
            raise InvalidInput(f"node names have 1 to {NODE_ID_CHARACTERS_MAX} letters, digits, '-', '_' and '.'")
        if len(label) > limits.NAME_CHARACTERS_MAX or not is_line(label):
            raise InvalidInput(f"a label has at most {limits.NAME_CHARACTERS_MAX} characters, on one line, all visible")
        if len(eos) > 64 or len(excluded) > 64:
            raise InvalidInput("a session has at most 64 end tokens and 64 excluded nodes")
        body = CreateSession(
            label=label,
            eos_token_ids=eos,
            policy=policy,
            use_local_cache=use_local_cache,
            publish=publish,
            exclude_nodes=excluded,
        )
        return Session(self._connection, self._connection.call(body, SessionCreated, CALL_TIMEOUT_S))

    def status(self) -> Status:
        """What the primary is doing.

        Raises:
            RequestFailed: no answer.
        """
        return self._connection.call(GetStatus(), Status, CALL_TIMEOUT_S)

    def requests(self, count: int = 20) -> tuple[RequestEvent, ...]:
        """The last requests of this primary (also of other clients), oldest first: sources, decisions, costs.

        Raises:
            InvalidInput: ``count`` is not from 1 to REQUEST_RECORDS_MAX.
            RequestFailed: no answer, or the node is no primary.
            RemoteProtocolError: a record cannot be read.
        """
        if not 1 <= count <= limits.REQUEST_RECORDS_MAX:
            raise InvalidInput(f"from 1 to {limits.REQUEST_RECORDS_MAX} requests can be asked for")
        found = self._connection.call(GetRequests(count=count), Requests, CALL_TIMEOUT_S)
        records = (decode_event(Topic.REQUEST, record) for record in found.records)
        return tuple(record for record in records if isinstance(record, RequestEvent))

    def cards(self) -> tuple[Card, ...]:
        """The capability cards of the node and of every node it knows of, by node id.

        Raises:
            RequestFailed: no answer.
            RemoteProtocolError: a card cannot be read, or its signature does not hold.
        """
        found: dict[str, Card] = {}
        more = True
        while more:
            digest = pack_digest((mark_of(c.node_id), c.incarnation, c.sequence) for c in found.values())
            reply = self._connection.call(ExchangeCards(cards=(), ages_ms=(), known=digest), CardList, CALL_TIMEOUT_S)
            fresh = {card.node_id: card for card in map(open_card, reply.cards)}
            more = reply.more and bool(fresh.keys() - found.keys())
            found.update(fresh)
        return tuple(found[node_id] for node_id in sorted(found))

    def tell_revocations(self, blobs: tuple[bytes, ...]) -> None:
        """Give the node signed revocations (:mod:`wire.revocations`), which it judges, keeps and spreads.

        Raises:
            RequestFailed: no answer.
        """
        self._connection.call(ExchangeCards(cards=(), ages_ms=(), known=None, revocations=blobs), CardList, CALL_TIMEOUT_S)

    def lacks_revocation(self, mark: bytes) -> bool:
        """Whether the node does not hold the revocation with this mark: only marks that it lacks are asked for.

        Raises:
            RequestFailed: no answer.
        """
        body = ExchangeCards(cards=(), ages_ms=(), known=b"", revoked=mark)
        return bool(self._connection.call(body, CardList, CALL_TIMEOUT_S).wanted_revocations == mark)

    def close(self) -> None:
        """Leave; open calls fail with UNAVAILABLE. Idempotent. Sessions stay on the primary until it forgets them."""
        self._connection.close()


def _given(path: Path | None) -> Path:
    assert path is not None
    return path
