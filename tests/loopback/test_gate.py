"""The gate with real handshakes: one-time tokens, allow-lists, and nothing else gets in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
import zmq
from zmq.utils import z85

from kakeya_zmq.io import sockets
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.gate import ZAP_ENDPOINT, Gate
from kakeya_zmq.io.sockets import SocketProfile
from tests.loopback.lane_support import HOST, Context, wait_until
from wire import limits
from wire.errors import LocalProtocolError

TOKEN = "ab" * 32
DOMAIN = "lane/1"


@dataclass(frozen=True)
class Pair:
    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> Pair:
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))


@pytest.fixture
def refusals() -> list[str]:
    return []


@pytest.fixture
def gate(context: Context, refusals: list[str]) -> Iterator[Gate]:
    made = Gate(context, on_refused=refusals.append)
    yield made
    made.close()


def make(context: Context, kind: int, profile: SocketProfile) -> zmq.Socket[bytes]:
    socket = sockets.create_socket(context, kind, profile)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    return socket


def plain_pull(context: Context, domain: str = DOMAIN) -> tuple[zmq.Socket[bytes], Address]:
    pull = make(context, zmq.PULL, sockets.LANE_PULL)
    sockets.apply_plain_server(pull, domain)
    return pull, sockets.bind(pull, Address(HOST, 0))


def plain_push(context: Context, address: Address, token: str) -> zmq.Socket[bytes]:
    push = make(context, zmq.PUSH, sockets.LANE_PUSH)
    sockets.apply_plain_client(push, token)
    push.connect(address.zmq_endpoint())
    return push


def test_the_bearer_gets_in_and_a_second_user_of_the_token_does_not(context: Context, gate: Gate) -> None:
    gate.admit_once(DOMAIN, TOKEN)
    pull, address = plain_pull(context)
    with pull, plain_push(context, address, TOKEN) as first:
        first.send(b"hello")
        assert pull.recv() == b"hello"
        with plain_push(context, address, TOKEN) as second:
            wait_until(lambda: gate.refused.get(("lane", "token already used"), 0) >= 1, "the second user is refused")
            assert second.poll(300, zmq.POLLOUT) == 0
        first.send(b"still here")
        assert pull.recv() == b"still here"


def test_a_wrong_token_is_refused_and_does_not_close_the_domain(context: Context, gate: Gate, refusals: list[str]) -> None:
    gate.admit_once(DOMAIN, TOKEN)
    pull, address = plain_pull(context)
    with pull:
        with plain_push(context, address, "cd" * 32):
            wait_until(lambda: gate.refused.get(("lane", "wrong token"), 0) >= 1, "a wrong token is refused")
        with plain_push(context, address, TOKEN) as honest:
            honest.send(b"hello")
            assert pull.recv() == b"hello"
    assert "wrong token" in refusals
    assert TOKEN not in repr(gate.refused)


def test_peers_without_credentials_are_refused(context: Context, gate: Gate) -> None:
    gate.admit_once(DOMAIN, TOKEN)
    pull, address = plain_pull(context)
    null_pull = make(context, zmq.PULL, sockets.LANE_PULL)
    null_pull.zap_domain = b"lane/null"
    null_address = sockets.bind(null_pull, Address(HOST, 0))
    with pull, null_pull, make(context, zmq.PUSH, sockets.LANE_PUSH) as stranger:
        stranger.connect(address.zmq_endpoint())  # NULL against PLAIN: libzmq itself says no
        stranger.connect(null_address.zmq_endpoint())  # NULL against NULL: the gate says no
        wait_until(lambda: ("lane", "no credentials") in gate.refused, "NULL is refused")
        assert stranger.poll(300, zmq.POLLOUT) == 0


def test_unknown_and_forgotten_domains_are_refused(context: Context, gate: Gate) -> None:
    gate.admit_once(DOMAIN, TOKEN)
    gate.forget(DOMAIN)
    gate.forget("never heard of")
    pull, address = plain_pull(context)
    with pull, plain_push(context, address, TOKEN):
        wait_until(lambda: ("unknown", "unknown domain") in gate.refused, "a forgotten domain is refused")


def test_curve_clients_need_the_server_key_and_a_place_on_the_list(context: Context, gate: Gate) -> None:
    server, member, stranger = Pair.make(), Pair.make(), Pair.make()
    gate.allow_curve("control", [member.public])
    router = make(context, zmq.ROUTER, sockets.CONTROL_SERVER)
    sockets.apply_curve_server(router, server, "control")
    address = sockets.bind(router, Address(HOST, 0))

    def dial(pair: Pair, server_public: bytes) -> zmq.Socket[bytes]:
        dealer = make(context, zmq.DEALER, sockets.CONTROL_CLIENT)
        sockets.apply_curve_client(dealer, server_public, pair)
        dealer.connect(address.zmq_endpoint())
        return dealer

    with router, dial(member, server.public) as friend:
        friend.send(b"ping")
        route, body = router.recv_multipart()
        router.send_multipart([route, body])
        assert friend.recv() == b"ping"
        with dial(stranger, server.public) as unlisted, dial(member, stranger.public) as misled:
            wait_until(lambda: ("control", "unknown key") in gate.refused, "an unlisted key is refused")
            for socket in (unlisted, misled):
                assert socket.poll(300, zmq.POLLOUT) == 0
        gate.allow_curve("control", [member.public, stranger.public])
        with dial(stranger, server.public) as listed:
            listed.send(b"later")
            assert router.recv_multipart()[1] == b"later"


def test_a_plain_token_opens_no_curve_domain(context: Context, gate: Gate) -> None:
    gate.allow_curve("control", [Pair.make().public])
    pull, address = plain_pull(context, "control")
    with pull, plain_push(context, address, TOKEN):
        wait_until(lambda: ("control", "wrong mechanism") in gate.refused, "the mechanism must fit the domain")


def test_malformed_requests_are_dropped_and_the_gate_goes_on(context: Context, gate: Gate, refusals: list[str]) -> None:
    gate.admit_once(DOMAIN, TOKEN)
    head = [b"", b"1.0", b"1"]
    requests: list[list[bytes]] = [
        [b""],
        [b"", b""],
        [b"x"],
        [b"", b"2.0", b"1", DOMAIN.encode(), b"", b"", b"PLAIN", b"", TOKEN.encode()],
        [b"", b"1.0", b"1"],
        [*head, b"\xff\xfe", b"", b"", b"PLAIN", b"", b""],
        [*head, DOMAIN.encode(), b"", b"", b"PLAIN" * 100, b"", b""],
    ]
    answered = [
        ([*head, DOMAIN.encode(), b"", b"", b"PLAIN"], b"400"),
        ([*head, DOMAIN.encode(), b"", b"", b"PLAIN", b"", TOKEN.encode(), b"more"], b"400"),
        ([*head, DOMAIN.encode(), b"", b"", b"CURVE", b"k" * 32], b"400"),
        ([*head, DOMAIN.encode(), b"", b"", b"GSSAPI", b"me"], b"400"),
        ([*head, DOMAIN.encode(), b"", b"", b"PLAIN", b"", TOKEN.encode()], b"200"),
    ]
    with context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 20_000)
        client.connect(ZAP_ENDPOINT)
        for request in requests:
            client.send_multipart(request)
        for request, status in answered:
            client.send_multipart(request)
            assert client.recv_multipart()[1:4] == [b"1.0", b"1", status]
    assert refusals.count("malformed request") == len(requests)


def test_a_context_has_one_gate(context: Context, gate: Gate) -> None:
    with pytest.raises(LocalProtocolError, match="already has a gate"):
        Gate(context)


def test_a_closed_gate_lets_nobody_in(context: Context) -> None:
    gate = Gate(context)
    gate.admit_once(DOMAIN, TOKEN)
    gate.close()
    gate.close()
    pull, address = plain_pull(context)
    with pull, plain_push(context, address, TOKEN) as push:
        assert push.poll(300, zmq.POLLOUT) == 0
    again = Gate(context)  # the endpoint is free again
    again.close()


def test_misuse_is_our_own_mistake(context: Context, gate: Gate) -> None:
    gate.admit_once(DOMAIN, TOKEN)
    with pytest.raises(LocalProtocolError):
        gate.admit_once(DOMAIN, "another")
    with pytest.raises(LocalProtocolError):
        gate.admit_once("", TOKEN)
    with pytest.raises(LocalProtocolError):
        gate.admit_once("lane/2", "")
    with pytest.raises(LocalProtocolError):
        gate.allow_curve("control", [b"short"])
    with make(context, zmq.PULL, sockets.LANE_PULL) as pull:
        with pytest.raises(LocalProtocolError, match="domain"):
            sockets.apply_plain_server(pull, "")
        with pytest.raises(LocalProtocolError, match="32 bytes"):
            sockets.apply_curve_server(pull, Pair(b"x", b"y"), "control")


def test_a_flooder_at_a_bound_pull_costs_no_memory(context: Context, gate: Gate) -> None:
    """Without the gate the same flood makes the receiver buffer everything (a multipart message that never ends)."""
    gate.admit_once(DOMAIN, TOKEN)
    pull, address = plain_pull(context)
    process = psutil.Process()
    block = os.urandom(32 * limits.KIB)
    with pull, context.socket(zmq.PUSH) as flooder:
        flooder.setsockopt(zmq.LINGER, 0)
        flooder.setsockopt(zmq.SNDHWM, 1)
        flooder.setsockopt(zmq.IMMEDIATE, 1)
        flooder.plain_username = b"kakeya"
        flooder.plain_password = b"guess"
        before = process.memory_info().rss
        flooder.connect(address.zmq_endpoint())
        wait_until(lambda: ("lane", "wrong token") in gate.refused, "the flooder is refused")
        sent = 0
        for _ in range(4096):  # 128 MiB
            try:
                flooder.send(block, zmq.DONTWAIT | zmq.SNDMORE)
            except zmq.Again:
                break
            sent += 1
        assert sent == 0
        assert process.memory_info().rss - before < 32 * limits.MIB
        assert pull.poll(0) == 0
