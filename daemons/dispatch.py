"""Carries effects of the protocol machines out, and brings what comes of them back as events.

The dispatcher remembers which machine sent an ask, opened a lane, drew a ticket or answers a request, so that every event
finds its way home. It runs on the reactor's thread; lanes and the engine's runner reach it through ``Reactor.post``.

Rules
- Effects are carried out in the order in which the machines made them, also when carrying one out feeds a machine again.
- An effect that cannot be carried out keeps no other from being carried out; it is counted in ``effect_failures``. A machine
  that waits for an end still gets one: of an ask, a lane or a command that could not even begin.
- Nothing is remembered of what has ended; no event follows after the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from daemons.dispatch_asks import Asks
from daemons.dispatch_sides import Lanes, Machine
from kakeya_zmq.engine import CommandFailed
from kakeya_zmq.engine_runner import EngineRunner
from kakeya_zmq.io.control_client import ControlClient
from kakeya_zmq.io.control_server import IncomingRequest
from kakeya_zmq.io.effect_queue import EffectQueue
from kakeya_zmq.io.failures import describe_exception
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol import effects as fx
from wire.errors import FailureCode, KakeyaError, LocalProtocolError
from wire.ids import NodeId
from wire.messages import UpdateBody

_log = logging.getLogger(__name__)


class Dispatcher:
    """Joins machines with sockets, lanes and the engine.

    Args:
        find_client: the control connection to a node, or None when there is none that is up.
        count: adds to a counter.
        note: remembers a noteworthy event.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        find_client: Callable[[NodeId], ControlClient | None],
        count: Callable[[str, int], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._reactor = reactor
        self._find_client = find_client
        self._count = count
        self._note = note
        self._services: list[tuple[Callable[[Any], bool], Machine]] = []
        self._extra: dict[int, Callable[[object], bool]] = {}
        self._requests: dict[fx.RequestKey, tuple[Machine, IncomingRequest]] = {}
        self._asks = Asks(reactor, find_client=find_client, feed=self.feed)
        self._lane_owners: dict[fx.LaneId, Machine] = {}
        self._ticket_owners: dict[fx.Ticket, Machine] = {}
        self._effects = EffectQueue(self._carry_out)
        self.lanes: Lanes | None = None
        self.runner: EngineRunner | None = None
        self.observe: Callable[[object], None] = lambda seen: None
        """Told every event of a machine before the machine, and every effect before it is carried out; must not raise."""

    # --- set-up ----------------------------------------------------------------------------------------------------

    def add(
        self,
        machine: Machine,
        *,
        handles: Callable[[Any], bool] | None = None,
        extra: Callable[[object], bool] | None = None,
    ) -> None:
        """Drive a machine.

        Args:
            handles: which request bodies are its business.
            extra: carries out effects of its own kind; returns whether it knew the effect.
        """
        if handles is not None:
            self._services.append((handles, machine))
        if extra is not None:
            self._extra[id(machine)] = extra
        self._reactor.add_deadline_source(machine.deadline, lambda now: self.feed(machine, fx.Tick()))

    # --- what comes in -----------------------------------------------------------------------------------------------

    def feed(self, machine: Machine, event: object) -> None:
        """Give a machine an event and carry out what it answers."""
        self.observe(event)
        try:
            effects = machine.on(event, self._reactor.clock())
        except Exception as error:
            if isinstance(event, fx.RequestArrived):
                raise  # the server answers for it
            self._machine_failed(machine, event, error)
            return
        if _log.isEnabledFor(logging.DEBUG):
            # Names only: events and effects hold prompts, keys and hashes.
            names = ", ".join(type(effect).__name__ for effect in effects)
            _log.debug("%s took %s: %s", type(machine).__name__, type(event).__name__, names)
        self.apply(machine, effects)

    def _machine_failed(self, machine: Machine, event: object, error: Exception) -> None:
        """A bug in a machine: whoever waits for an answer of it must not wait for their deadlines."""
        self._count("machine_failures", 1)
        _log.error("%s failed at %s: %s", type(machine).__name__, type(event).__name__, describe_exception(error))
        for key in [key for key, (owner, _) in self._requests.items() if owner is machine]:
            _, incoming = self._requests.pop(key)
            text = "this node failed in the middle of the request; see its log"
            self.observe(fx.SendFailure(key, FailureCode.INTERNAL, text))
            incoming.fail(FailureCode.INTERNAL, text)

    def request(self, incoming: IncomingRequest) -> bool:
        """Route a peer's request; False when no machine handles its body."""
        machine = next((machine for handles, machine in self._services if handles(incoming.body)), None)
        if machine is None:
            return False
        key = fx.RequestKey((incoming.peer.session_id, incoming.request_id))
        self._requests[key] = (machine, incoming)
        incoming.on_update = lambda body: self._updated(key, body)
        incoming.on_end = lambda reason: self._request_ended(key, reason)
        event = fx.RequestArrived(
            key=key,
            node_id=NodeId(incoming.peer.node_id),
            roles=tuple(incoming.peer.roles),
            body=incoming.body,
            deadline=incoming.deadline,
            identity_public_key=incoming.peer.identity_public_key,
        )
        try:
            self.feed(machine, event)
        except Exception:
            # A bug in the machine: the server answers for it, and nothing may wait for an answer from here.
            self._requests.pop(key, None)
            self.observe(fx.SendFailure(key, FailureCode.INTERNAL, "this node failed at the request; see its log"))
            raise
        return True

    def lane_event(self, event: fx.LaneOpened | fx.PartsReceived | fx.CreditEarned | fx.LaneFinished) -> None:
        """An event of a lane; called on the reactor's thread."""
        owner = self._lane_owners.get(event.lane)
        if isinstance(event, fx.LaneFinished):
            self._lane_owners.pop(event.lane, None)
        if owner is not None:
            self.feed(owner, event)

    def engine_event(self, event: fx.CommandEvent | fx.CommandEnded) -> None:
        """An event of the engine's runner; called on the reactor's thread."""
        owner = self._ticket_owners.get(event.ticket)
        if isinstance(event, fx.CommandEnded):
            self._ticket_owners.pop(event.ticket, None)
        if owner is not None:
            self.feed(owner, event)

    def _updated(self, key: fx.RequestKey, body: UpdateBody) -> None:
        entry = self._requests.get(key)
        if entry is not None:
            self.feed(entry[0], fx.UpdateArrived(key, body))

    def _request_ended(self, key: fx.RequestKey, reason: str) -> None:
        entry = self._requests.pop(key, None)
        if entry is not None:
            self.feed(entry[0], fx.RequestCancelled(key, reason))

    # --- what goes out -----------------------------------------------------------------------------------------------

    def apply(self, machine: Machine, effects: Sequence[object]) -> None:
        """Carry out a machine's effects, in order, behind those that wait."""
        self._effects.extend((machine, effect) for effect in effects)

    def _carry_out(self, entry: tuple[Machine, object]) -> None:
        machine, effect = entry
        self.observe(effect)
        try:
            self._apply_one(machine, effect)
        except Exception as error:  # whatever it is: the other effects, of other users, must be carried out
            self._count("effect_failures", 1)
            _log.error("%s could not be carried out: %s", type(effect).__name__, describe_exception(error))

    def _apply_one(self, machine: Machine, effect: object) -> None:
        match effect:
            case fx.SendReply() | fx.SendProgress() | fx.SendFailure():
                self._answer(effect)
            case fx.Ask() | fx.SendUpdate() | fx.CancelAsk():
                self._asks.carry_out(machine, effect)
            case fx.RunCommand() | fx.CancelCommand():
                self._run(machine, effect)
            case fx.Count(name=name, amount=amount):
                self._count(name, amount)
            case fx.Note(level=level, text=text):
                self._note(level, text)
            case (
                fx.BindSender()
                | fx.ConnectSender()
                | fx.FeedSender()
                | fx.AddCredit()
                | fx.BindReceiver()
                | fx.ConnectReceiver()
                | fx.CloseLane()
            ):
                self._lane(machine, effect)
            case _:
                extra = self._extra.get(id(machine))
                if extra is None or not extra(effect):
                    raise TypeError(f"nobody carries out {type(effect).__name__}")

    def _answer(self, effect: fx.SendReply | fx.SendProgress | fx.SendFailure) -> None:
        entry = self._requests.get(effect.key)
        if entry is None:
            return
        incoming = entry[1]
        match effect:
            case fx.SendProgress(body=progress):
                incoming.progress(progress)
            case fx.SendReply(key=key, body=reply):
                del self._requests[key]
                incoming.reply(reply)
            case fx.SendFailure(key=key, code=code, message=message):
                del self._requests[key]
                incoming.fail(code, message)

    def _run(self, machine: Machine, effect: fx.RunCommand | fx.CancelCommand) -> None:
        runner = self.runner
        match effect:
            case fx.RunCommand(ticket=ticket, command=command):
                if ticket in self._ticket_owners:
                    raise LocalProtocolError(f"engine ticket {ticket} is in use")
                self._ticket_owners[ticket] = machine
                try:
                    assert runner is not None, "an engine command on a node without a model"
                    runner.submit(ticket, command)
                except Exception:
                    failed = CommandFailed(command.session_id, "the engine did not take the command", 0)
                    self._reactor.post(lambda: self.engine_event(fx.CommandEvent(ticket, failed)))
                    self._reactor.post(lambda: self.engine_event(fx.CommandEnded(ticket, cancelled=False)))
                    raise
            case fx.CancelCommand(ticket=ticket):
                if runner is not None:
                    runner.cancel(ticket)

    def _lane(
        self,
        machine: Machine,
        effect: fx.BindSender
        | fx.ConnectSender
        | fx.FeedSender
        | fx.AddCredit
        | fx.BindReceiver
        | fx.ConnectReceiver
        | fx.CloseLane,
    ) -> None:
        lanes = self.lanes
        assert lanes is not None, "a lane on a node without a bulk shell"
        match effect:
            case fx.BindSender(lane=lane):
                self._open(machine, lane, lambda: lanes.bind_sender(effect))
            case fx.BindReceiver(lane=lane):
                self._open(machine, lane, lambda: lanes.bind_receiver(effect))
            case fx.ConnectSender(lane=lane, node_id=node_id):
                self._open(machine, lane, lambda: lanes.connect_sender(effect, self._host_of(node_id)))
            case fx.ConnectReceiver(lane=lane, node_id=node_id):
                self._open(machine, lane, lambda: lanes.connect_receiver(effect, self._host_of(node_id)))
            case fx.FeedSender(lane=lane):
                try:
                    lanes.feed(effect)
                except Exception:
                    # The peer would wait for parts that never come.
                    lanes.close(fx.CloseLane(lane, ok=False, reason="its parts could not be sent"))
                    raise
            case fx.AddCredit():
                lanes.add_credit(effect)
            case fx.CloseLane():
                lanes.close(effect)

    def _open(self, machine: Machine, lane: fx.LaneId, opening: Callable[[], None]) -> None:
        if lane in self._lane_owners:
            raise LocalProtocolError(f"lane {lane} is in use")
        self._lane_owners[lane] = machine
        try:
            opening()
        except Exception as error:  # ports, threads or files have run out, or the peer's grant makes no sense
            reason = str(error) if isinstance(error, KakeyaError) else f"the lane could not open ({type(error).__name__})"
            finished = fx.LaneFinished(lane, ok=False, reason=reason, transferred_bytes=0)
            self._reactor.post(lambda: self.lane_event(finished))

    def _host_of(self, node_id: NodeId) -> str:
        client = self._find_client(node_id)
        if client is None:
            raise KakeyaError(f"{node_id} is not connected any more")
        return client.host

    # --- figures -------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """What is open right now: for status and leak tests."""
        return {
            "open_requests": len(self._requests),
            "open_asks": len(self._asks),
            "open_lanes": len(self._lane_owners),
            "open_commands": len(self._ticket_owners),
        }
