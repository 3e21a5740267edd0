"""Secure control sessions: the client's and the server's machine.

Rules: everything that decides about HELLO, WELCOME, counters, request ids, liveness and node identities lives in the modules
``session_*``; nothing there knows sockets, threads or what a request means.
Both machines are ``on(event, now) -> list[effect]`` plus ``deadline()``; ``now`` is seconds on a monotonic clock. Nothing a
peer sends raises: it is dropped and counted in ``refusals``. The host hands over the frames that have arrived before it
hands over ``Tick``, or a stall of its own looks like silent peers.

Theory of operation, client (one machine a server it talks to):

    state      event                          next       what happens
    CLOSED     SocketOpened                   GREETING   HELLO
    GREETING   1 s without answer             GREETING   the same HELLO again (a late answer to the first one still counts)
    GREETING   WELCOME                        UP         Ping at once (measures, and proves to the server that we are there)
    GREETING   5 s without answer             CLOSED     Reopen after full-jitter backoff
    GREETING   WELCOME of a wrong node        CLOSED     waiting requests fail; Reopen after backoff
    UP         1 s without hearing anything   UP         Ping
    UP         no answer 4 s after such Ping  CLOSED     sent requests fail UNAVAILABLE; Reopen after backoff
    UP         UNKNOWN_SESSION                GREETING   sent requests fail UNAVAILABLE; new HELLO at once
    UP         Goodbye                        CLOSED     sent requests fail UNAVAILABLE; Reopen after backoff
    UP         Goodbye with a port            CLOSED     Reopen there at once; what the server did not look at is sent again
    any        Abandon                        CLOSED     sent requests fail UNAVAILABLE; Reopen after the host's time
    any        Leave                          LEFT       Goodbye; every request fails CANCELLED

Requests wait until the session is up; their deadline runs. A request ends exactly once: Replied, Failed, or silently by the
host's own StartCancel. SessionDown tells that there is no session and why; it also comes for an attempt that never got up.

Server: a session belongs to the route its HELLO came from, and a route has one session. A session *counts* (PeerUp, safe
from being evicted by newcomers) after its first sealed message, for only that proves that the HELLO was not a replayed one.
The same HELLO again on its route gets the same WELCOME; anywhere else it is refused. A request the server opened ends
exactly once: the host's reply or failure, or RequestEnded. A session ends on the next Tick when a message to it could not be
sent because its connection is gone (names of connections never come back), after 15 s of silence, and after 6 s of silence
when its node has a newer one: what was asked in it is wanted by nobody. After Move nothing new is opened, and each session
ends, with the port at which the node goes on, as soon as nothing of it is open: a client loses no request by it.
"""

from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.session_client import ClientSession, ClientState
from kakeya_zmq.protocol.session_server import ServerSessions
from kakeya_zmq.protocol.session_values import (
    Abandon,
    ClientEffect,
    ClientEvent,
    Expel,
    Failed,
    FramesReceived,
    Leave,
    LocalNode,
    Measured,
    Move,
    NameTaken,
    PeerDown,
    PeerInfo,
    PeerUp,
    Progressed,
    Refused,
    Reopen,
    Replied,
    RequestEnded,
    RequestOpened,
    RequestUpdated,
    RouteGone,
    RouterFrames,
    RouteTransmit,
    SendFailure,
    SendProgress,
    SendReply,
    ServerEffect,
    ServerEvent,
    SessionDown,
    SessionUp,
    Shutdown,
    SocketOpened,
    StartCancel,
    StartRequest,
    StartUpdate,
    Transmit,
)

__all__ = [
    "Abandon",
    "ClientEffect",
    "ClientEvent",
    "ClientSession",
    "ClientState",
    "Expel",
    "Failed",
    "FramesReceived",
    "Leave",
    "LocalNode",
    "Measured",
    "Move",
    "NameTaken",
    "PeerDown",
    "PeerInfo",
    "PeerUp",
    "Progressed",
    "Refused",
    "Reopen",
    "Replied",
    "RequestEnded",
    "RequestOpened",
    "RequestUpdated",
    "RouteGone",
    "RouteTransmit",
    "RouterFrames",
    "SendFailure",
    "SendProgress",
    "SendReply",
    "ServerEffect",
    "ServerEvent",
    "ServerSessions",
    "SessionDown",
    "SessionUp",
    "Shutdown",
    "SocketOpened",
    "StartCancel",
    "StartRequest",
    "StartUpdate",
    "Tick",
    "Transmit",
]
