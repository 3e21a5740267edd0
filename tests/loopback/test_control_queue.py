"""What libzmq holds for the control server of a peer that sends faster than it is served."""

from __future__ import annotations

from typing import Final

import zmq

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import CONTROL_SERVER, bind, create_socket
from wire.limits import CONTROL_MESSAGE_BYTES_MAX

ON_THEIR_WAY: Final = 8
"""So many of the largest messages fit into what both ends and the system hold besides, at most."""
SILENCE_MS: Final = 500


def test_of_long_requests_that_nobody_reads_few_are_held() -> None:
    reactor = Reactor()
    server = create_socket(reactor.context, zmq.ROUTER, CONTROL_SERVER)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    try:
        peer.sndhwm = 1
        for socket, buffer in ((peer, zmq.SNDBUF), (server, zmq.RCVBUF)):
            socket.setsockopt(buffer, 65_536)
        peer.connect(bind(server, Address("127.0.0.1", 0)).zmq_endpoint())
        taken = 0
        while taken < 64 and peer.poll(SILENCE_MS, zmq.POLLOUT):
            peer.send(bytes(CONTROL_MESSAGE_BYTES_MAX))
            taken += 1
        assert CONTROL_SERVER.queue_messages <= taken <= CONTROL_SERVER.queue_messages + ON_THEIR_WAY < 64
    finally:
        peer.close(linger=0)
        context.term()
        reactor.close_socket(server)
        assert reactor.close()
