"""The answer to a HELLO that is let in: a session and the WELCOME that tells of it."""

from __future__ import annotations

from collections.abc import Callable

from kakeya_zmq.protocol.session_table import ServerSession
from kakeya_zmq.protocol.session_values import LocalNode, PeerInfo
from wire import handshake
from wire.messages import Hello, Welcome


def begin_session(
    hello: Hello,
    hello_hash: bytes,
    *,
    route: bytes,
    now: float,
    local: LocalNode,
    bus_port: int,
    handshake_keys: handshake.HandshakeKeys,
    random_bytes: Callable[[int], bytes],
) -> ServerSession:
    """The session of whoever said ``hello`` on this route; its WELCOME is not sent yet."""
    ephemeral = handshake.new_ephemeral(random_bytes)
    welcome = Welcome(
        node_id=local.node_id,
        identity_public_key=local.identity.public_key,
        ephemeral_public_key=ephemeral.public,
        incarnation=local.incarnation,
        roles=local.roles,
        software=local.software,
        session_id=handshake.new_session_id(random_bytes),
        hello_hash=hello_hash,
        bus_port=bus_port,
        signature=b"",
    )
    keys = handshake.agree_on_keys(handshake_keys, ephemeral, hello.ephemeral_public_key, welcome)
    channel = handshake.Channel(
        session_id=welcome.session_id,
        key_id=handshake_keys.key_id,
        send_key=keys.server_to_client,
        receive_key=keys.client_to_server,
    )
    peer = PeerInfo(
        session_id=welcome.session_id,
        node_id=hello.node_id,
        identity_public_key=hello.identity_public_key,
        roles=hello.roles,
        incarnation=hello.incarnation,
        software=hello.software,
        bus_port=0,
    )
    frames = handshake.seal_welcome(welcome, local.identity, handshake_keys, random_bytes)
    return ServerSession(route, peer, channel, hello_hash, frames, heard_at=now)
