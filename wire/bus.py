"""Bus messages: their layout, their sealing and their order.

A message is three ZeroMQ frames::

    [topic: 1 byte] [header] [nonce: 24 bytes | secretbox(identity public key: 32 bytes | signature: 64 bytes | payload)]
    header = magic "KB" | version u8 | topic u8 | node id length u16 | incarnation u64 | sequence u64 | node id (UTF-8)

The first frame is what subscriptions filter by; integers are big-endian. The bus is multicast, so there is no session:

* Topics belong to one of two groups, each with its own group key. Fleet topics carry what only members may read; telemetry
  topics are also readable with the telemetry-read key, which dashboards hold instead of the PSK.
* secretbox has no associated data, so the header is bound by the key: each message is sealed under
  ``BLAKE2b(key=group key, header)``. A changed header opens nothing. The nonce is random all the same, because a restarted
  publisher could repeat an (incarnation, sequence).
* The group key proves membership, not identity. So each message is signed with the identity key of the node it is of:
  Ed25519 over ``"kakeya-zmq bus" 0x00 | mark of the group key | header | payload``, which holds for no other fleet, topic,
  name, incarnation or sequence. Whether that key belongs to that name is the reader's to say.
* Order and replay: per (node, key, topic), only a greater (incarnation, sequence) than the last one is taken
  (:class:`wire.replay.SequenceTracker`, one for each topic, so that who subscribes to one topic sees no false gaps).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from nacl import bindings
from nacl.exceptions import CryptoError

from wire import limits
from wire.errors import AuthenticationError, ForgedMessageError, LocalProtocolError, RemoteProtocolError
from wire.ids import NodeId
from wire.keys import KEY_BYTES, SIGNATURE_BYTES, FleetKey, NodeIdentity, Purpose, TelemetryKey
from wire.text import is_node_id

_MAGIC: Final = b"KB"
_HEADER: Final = struct.Struct(">2sBBHQQ")
_PERSON: Final = b"kakeya-bus-v2"
_PERSON_MARK: Final = b"kz bus group"
_CONTEXT: Final = b"kakeya-zmq bus\0"
_MARK_BYTES: Final = 16
_SIGNED_BYTES: Final = KEY_BYTES + SIGNATURE_BYTES
_NONCE_BYTES: Final = bindings.crypto_secretbox_NONCEBYTES
_TAG_BYTES: Final = bindings.crypto_secretbox_MACBYTES
NODE_ID_BYTES_MAX: Final = 4 * limits.NAME_CHARACTERS_MAX
PAYLOAD_BYTES_MAX: Final = (
    limits.BUS_MESSAGE_BYTES_MAX - _HEADER.size - NODE_ID_BYTES_MAX - _NONCE_BYTES - _TAG_BYTES - _SIGNED_BYTES
)
"""Largest payload of one bus message."""


class Group(Enum):
    """Who can read a topic."""

    FLEET = "fleet"
    TELEMETRY = "telemetry"


class Topic(IntEnum):
    """What a message is about; one byte on the wire, the unit of subscription. Bit 6 marks the telemetry group."""

    CARD = 0x01
    """Signed capability cards."""
    CACHE = 0x02
    """What a store gained and lost."""
    JOB = 0x41
    """Progress of prefill jobs. This and all below: :mod:`wire.events`."""
    NODE = 0x42
    """The whole present state of a node, again and again."""
    REQUEST = 0x43
    """Finished requests of a primary."""
    TRANSFER = 0x44
    """Bulk transfers that have ended."""
    EVICTION = 0x45
    """What a store evicted."""
    SECURITY = 0x46
    """Refusals, revocations, registrations, key changes."""
    LOG = 0x47
    """Noteworthy lines."""

    @property
    def group(self) -> Group:
        return Group.TELEMETRY if self & 0x40 else Group.FLEET

    @property
    def frame(self) -> bytes:
        """The topic frame, also the subscription prefix."""
        return bytes((self,))


@dataclass(frozen=True, slots=True)
class BusMessage:
    """One message: ``sequence`` counts from 1 in each (node, topic, incarnation).

    ``identity_public_key``, 32 bytes: who has signed it. That it is the key of the node ``node_id`` is not said by that.
    """

    node_id: NodeId
    topic: Topic
    incarnation: int
    sequence: int
    payload: bytes
    identity_public_key: bytes


def group_keys(keys: FleetKey | TelemetryKey) -> dict[Group, bytes]:
    """The group keys that a holder of ``keys`` has."""
    if isinstance(keys, TelemetryKey):
        return {Group.TELEMETRY: keys.seal_key}
    return {Group.FLEET: keys.derive(Purpose.BUS_FLEET), Group.TELEMETRY: keys.telemetry_key().seal_key}


def _message_key(group_key: bytes, header: bytes) -> bytes:
    if len(group_key) != KEY_BYTES:
        raise LocalProtocolError(f"a bus group key has {KEY_BYTES} bytes, not {len(group_key)}")
    return hashlib.blake2b(header, key=group_key, digest_size=KEY_BYTES, person=_PERSON).digest()


def _signed_bytes(group_key: bytes, header: bytes, payload: bytes) -> bytes:
    """What the signature is over; the header says how long it is itself."""
    mark = hashlib.blake2b(key=group_key, digest_size=_MARK_BYTES, person=_PERSON_MARK).digest()
    return b"".join((_CONTEXT, mark, header, payload))


def seal_message(
    message: BusMessage, identity: NodeIdentity, group_key: bytes, random_bytes: Callable[[int], bytes]
) -> list[bytes]:
    """The frames of ``message``.

    Raises:
        LocalProtocolError: the payload or the node id is too large, or ``identity`` is not the one it names.
    """
    if message.identity_public_key != identity.public_key:
        raise LocalProtocolError("a bus message is signed by the node it is of")
    node_id = message.node_id.encode()
    if not 1 <= len(node_id) <= NODE_ID_BYTES_MAX:
        raise LocalProtocolError(f"a node id of {len(node_id)} bytes cannot travel on the bus")
    if len(message.payload) > PAYLOAD_BYTES_MAX:
        raise LocalProtocolError(f"a bus payload of {len(message.payload)} bytes exceeds {PAYLOAD_BYTES_MAX}")
    header = (
        _HEADER.pack(_MAGIC, limits.PROTOCOL_VERSION, message.topic, len(node_id), message.incarnation, message.sequence)
        + node_id
    )
    signature = identity.sign(_signed_bytes(group_key, header, message.payload))
    content = message.identity_public_key + signature + message.payload
    nonce = random_bytes(_NONCE_BYTES)
    box = bindings.crypto_secretbox(content, nonce, _message_key(group_key, header))
    return [message.topic.frame, header, nonce + box]


def open_message(frames: Sequence[bytes], group_keys: Mapping[Group, bytes]) -> BusMessage:
    """The message in ``frames``, whose signature holds for the identity key that it names.

    Raises:
        RemoteProtocolError: the layout is wrong, or the topic is of no group we have a key for.
        AuthenticationError: the seal does not hold.
        ForgedMessageError: the seal holds, the signature does not.
    """
    if len(frames) != 3:
        raise RemoteProtocolError(f"a bus message has 3 frames, not {len(frames)}")
    topic_frame, header, sealed = frames
    if len(header) < _HEADER.size or len(header) > _HEADER.size + NODE_ID_BYTES_MAX:
        raise RemoteProtocolError(f"a bus header of {len(header)} bytes")
    if not _NONCE_BYTES + _TAG_BYTES + _SIGNED_BYTES <= len(sealed) <= limits.BUS_MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"a sealed bus payload of {len(sealed)} bytes")
    magic, version, topic_number, node_id_bytes, incarnation, sequence = _HEADER.unpack_from(header)
    if magic != _MAGIC or version != limits.PROTOCOL_VERSION:
        raise RemoteProtocolError("a bus message of another protocol version")
    if len(header) != _HEADER.size + node_id_bytes or topic_frame != bytes((topic_number,)):
        raise RemoteProtocolError("a bus header that contradicts itself")
    try:
        topic = Topic(topic_number)
        node_id = NodeId(header[_HEADER.size :].decode())
    except ValueError:
        raise RemoteProtocolError("a bus message of an unknown topic or sender") from None
    if not is_node_id(node_id):
        raise RemoteProtocolError("a bus message with a bad node id")
    group_key = group_keys.get(topic.group)
    if group_key is None:
        raise RemoteProtocolError("a bus message of a group that is not ours to read")
    try:
        content = bindings.crypto_secretbox_open(
            sealed[_NONCE_BYTES:], sealed[:_NONCE_BYTES], _message_key(group_key, header)
        )
    except CryptoError:
        raise AuthenticationError("the seal of a bus message does not hold") from None
    public_key, signature, payload = content[:KEY_BYTES], content[KEY_BYTES:_SIGNED_BYTES], content[_SIGNED_BYTES:]
    try:
        NodeIdentity.verify(public_key, _signed_bytes(group_key, header, payload), signature)
    except AuthenticationError:
        raise ForgedMessageError("the signature of a bus message does not hold", node_id) from None
    return BusMessage(node_id, topic, incarnation, sequence, payload, public_key)
