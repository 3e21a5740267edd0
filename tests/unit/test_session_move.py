"""A server that goes on at another port loses no request, and one that expels a node ends what is open of it."""

from __future__ import annotations

from kakeya_zmq.protocol.session import (
    ClientState,
    Expel,
    Failed,
    Move,
    PeerDown,
    Reopen,
    Replied,
    RequestEnded,
    RequestOpened,
    RouterFrames,
    SendReply,
    SocketOpened,
    Transmit,
)
from tests.unit.test_session import CLIENT_NODE, Pair, make_client, make_server, of
from wire.messages import Done

MOVE = Move(4242, "its fleet key is retired")


def session_of(pair: Pair) -> bytes:
    (peer,) = pair.server.peers
    return peer.session_id


def test_an_idle_session_is_moved_at_once() -> None:
    pair = Pair().up()
    pair.at_server(MOVE)
    assert of(Reopen, pair.told_client)[-1] == Reopen(delay_s=0.0, port=4242)
    assert pair.client.state is ClientState.CLOSED
    assert pair.server.peers == ()


def test_what_is_open_is_finished_first_and_what_comes_meanwhile_is_sent_again_elsewhere() -> None:
    pair = Pair().up()
    old = pair.ask()
    session = session_of(pair)
    pair.at_server(MOVE)
    young = [pair.ask(), pair.ask()]
    assert not of(Reopen, pair.told_client)
    assert [each.request_id for each in of(RequestOpened, pair.told_server)] == [old]
    pair.at_server(SendReply(session, old, Done()))
    assert [each.request_id for each in of(Replied, pair.told_client)] == [old]
    assert of(Reopen, pair.told_client)[-1].port == 4242
    assert not of(Failed, pair.told_client)
    # The same client at the new endpoint: nothing is lost, nothing is asked twice, the order is kept.
    pair.server = make_server(seed=9)
    pair.told_server.clear()
    pair.at_client(SocketOpened())
    assert [each.request_id for each in of(RequestOpened, pair.told_server)] == young
    for request_id in young:
        pair.at_server(SendReply(session_of(pair), request_id, Done()))
    assert [each.request_id for each in of(Replied, pair.told_client)] == [old, *young]


def test_a_request_that_crossed_the_move_is_not_lost() -> None:
    """It was sent before the Goodbye came, and reaches a server that has ended the session."""
    pair = Pair().up()
    pair.cut = True
    crossing = pair.ask()
    pair.cut = False
    pair.at_server(MOVE)
    pair.server = make_server(seed=9)
    pair.at_client(SocketOpened())
    assert [each.request_id for each in of(RequestOpened, pair.told_server)] == [crossing]
    assert not of(Failed, pair.told_client)


def test_a_request_for_which_the_time_runs_out_meanwhile_fails_as_always() -> None:
    pair = Pair().up()
    pair.cut = True
    pair.ask(timeout_s=2.0)
    pair.cut = False
    pair.at_server(MOVE)
    pair.wait(3.0)
    assert len(of(Failed, pair.told_client)) == 1


def test_nobody_new_is_let_in_at_an_endpoint_that_is_given_up() -> None:
    server = make_server()
    server.on(MOVE, 0.0)
    (hello,) = of(Transmit, make_client().on(SocketOpened(), 0.0))
    server.on(RouterFrames(b"r", hello.frames), 0.0)
    assert server.refusals["a hello at an endpoint that is being given up"] == 1
    assert server.peers == ()


def test_an_expelled_node_loses_its_sessions_and_others_do_not() -> None:
    pair = Pair().up()
    pair.ask()
    pair.at_server(Expel(bytes(32), "not this one"))
    assert len(pair.server.peers) == 1
    pair.at_server(Expel(CLIENT_NODE.identity.public_key, "revoked"))
    assert pair.server.peers == ()
    assert len(of(RequestEnded, pair.told_server)) == len(of(PeerDown, pair.told_server)) == 1
    assert len(of(Failed, pair.told_client)) == 1
