"""A member of the fleet that says what it likes: raw sockets and the second implementation of the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import msgpack
import zmq

from tests.vectors import independent as wire
from tests.vectors.independent import Identity

REPLY: Final = 4
FAILURE: Final = 6
Answer = Callable[[list[Any]], list[Any]]
"""Body of a request → [REPLY, body] or [FAILURE, code, message]."""
POLL_MS: Final = 50


def purpose_curve(psk: bytes, purpose: str) -> tuple[bytes, bytes]:
    return wire.curve_pair(wire.purpose_key(psk, purpose))


class RogueMember:
    """Listens as a node does: answers requests as it is told, and says on its bus what it is told, to whoever subscribes.

    Args:
        answer: what it says to a request.
        events: (topic, payload), published again and again.
        frames: made of the telemetry group's key and published as they are, again and again.
        software: what its WELCOME says.
    """

    def __init__(
        self,
        psk: bytes,
        who: Identity,
        answer: Answer,
        *,
        events: tuple[tuple[int, Any], ...] = (),
        frames: Callable[[bytes], list[list[bytes]]] = lambda group_key: [],
        software: str = "independent",
        roles: tuple[str, ...] = ("primary", "cache"),
    ) -> None:
        self.who = who
        self._psk = psk
        self._answer = answer
        self._events = events
        self._frames = frames
        self._software = software
        self._roles = roles
        self._sessions: dict[bytes, wire.Session] = {}
        self._sequence = 0
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._bound(zmq.ROUTER, purpose_curve(psk, "kz curve server"))
        telemetry = wire.purpose_key(psk, "kz bus telemetry")
        self._bus = self._bound(zmq.XPUB, wire.bus_curve_pair(telemetry))
        self._bus_key = wire.telemetry_seal_key(telemetry)
        self.address, self.bus_port = self._control[1], int(self._bus[1].rpartition(":")[2])
        self.bus_address = self._bus[1]
        self._thread = threading.Thread(target=self._run, name="rogue-member")

    def _bound(self, kind: int, curve: tuple[bytes, bytes]) -> tuple[zmq.Socket[bytes], str]:
        made = self._context.socket(kind)
        made.linger = 0
        made.curve_server = True
        made.curve_publickey, made.curve_secretkey = curve
        return made, f"127.0.0.1:{made.bind_to_random_port('tcp://127.0.0.1')}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._control[0].close()
        self._bus[0].close()
        self._context.term()

    def _run(self) -> None:
        control, bus = self._control[0], self._bus[0]
        while not self._stop.is_set():
            if control.poll(POLL_MS):
                route, header, *rest = control.recv_multipart()
                for frames in self._reply(header, b"".join(rest)):
                    control.send_multipart([route, *frames])
            while bus.poll(0):
                bus.recv_multipart()
            for topic, payload in self._events:
                bus.send_multipart(self._published(topic, payload))
            for message in self._frames(self._bus_key):
                bus.send_multipart(message)

    def _reply(self, header: bytes, body: bytes) -> list[tuple[bytes, ...]]:
        kind, _, session_id, _ = wire.unpack_header(header)
        if kind == wire.HELLO:
            return [self._welcome(header, body)]
        session = self._sessions.get(session_id)
        if kind != wire.SEALED or session is None:
            return []
        envelope = session.open(header, body)
        if envelope[0] == 7:
            return [session.seal([8])]
        if envelope[0] != 1:
            return []
        return [session.seal([kind, envelope[1], *said]) for kind, *said in self._says(envelope[3])]

    def _says(self, body: list[Any]) -> list[list[Any]]:
        """Everything it says to one request, in order."""
        return [self._answer(body)]

    def _welcome(self, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        hello = wire.read_hello(self._psk, header, body)
        secret, session_id = wire.os.urandom(32), wire.os.urandom(16)
        fields = [
            self.who.node_id,
            self.who.public,
            wire.curve_pair(secret)[0],
            1,
            list(self._roles),
            self._software,
            session_id,
            wire.hello_hash((header, body)),
            self.bus_port,
            wire.NO_SIGNATURE,
        ]
        welcome = wire.sign_fields(self.who.signing, b"kakeya-zmq welcome\0", fields)
        from_client, to_client = wire.session_keys(self._psk, secret, hello[2], welcome)
        key = wire.key_id(self._psk)
        self._sessions[session_id] = wire.Session(key, session_id, to_client, from_client)
        answer = wire.pack_header(wire.WELCOME, key, session_id)
        return answer, wire.seal_prefixed(wire.purpose_key(self._psk, "kz welcome"), answer, msgpack.packb(welcome))

    def _published(self, topic: int, payload: Any) -> list[bytes]:
        self._sequence += 1
        return wire.seal_bus_message(self._bus_key, self.who, topic, 1, self._sequence, msgpack.packb(payload))
