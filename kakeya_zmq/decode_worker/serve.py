"""The child's side: runs an engine for the parent on one thread, until the parent is gone.

Two things end the process when its parent ends, however that ends: the channel's end of file, which is noticed between two
steps, and the end of file of standard input, which a thread waits for, in the middle of a step. Nobody writes to standard
input; the parent's death is all it can tell.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

from kakeya_zmq.decode_worker import messages as m
from kakeya_zmq.decode_worker.channel import Channel, ChannelClosed
from kakeya_zmq.engine import Engine, Event
from wire.errors import ConfigError, KakeyaError, RemoteProtocolError
from wire.limits import NAME_CHARACTERS_MAX

LIFELINE: Final = 0
"""Descriptor of standard input."""


def connect(descriptor: int) -> Channel:
    """The channel on a descriptor that was inherited."""
    return Channel(socket.socket(fileno=descriptor), _wait_for_ever)


def end_with_parent(leave: Callable[[], None] = lambda: os._exit(0)) -> None:
    """Watch standard input on a thread of its own, and ``leave`` at its end."""

    def watch() -> None:
        while os.read(LIFELINE, 64):
            pass
        leave()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def receive_settings(channel: Channel) -> m.Load:
    """The first message.

    Raises:
        RemoteProtocolError: the first message is another one.
        ChannelClosed: the parent is gone.
    """
    body, _ = channel.receive()
    message = m.decode_request(body)
    if not isinstance(message, m.Load):
        raise RemoteProtocolError(f"the first message is {type(message).__name__}")
    return message


def tell(channel: Channel, text: str) -> None:
    """Say one line while the model is being loaded."""
    channel.send(m.encode(m.Told(text[: m.LINE_CHARACTERS_MAX])))


def refuse(channel: Channel, error: Exception) -> None:
    """Say why the model cannot be loaded; only a KakeyaError's own text leaves the process."""
    if isinstance(error, KakeyaError):
        kind = "ConfigError" if type(error) is ConfigError else "ModelError"
        message, remedy = error.message, error.remedy
    else:
        kind, message, remedy = "ModelError", f"the engine failed to start: {type(error).__name__}", ""
    channel.send(m.encode(m.Refused(kind, message[: m.LINE_CHARACTERS_MAX], remedy[: m.LINE_CHARACTERS_MAX])))


def serve(channel: Channel, engine: Engine, tokens_per_second: float) -> None:
    """Answer requests until the parent is gone.

    Raises:
        RemoteProtocolError: the parent broke a rule; the process should end.
    """
    channel.send(m.encode(m.Loaded(engine.facts, tokens_per_second, engine.memory())))
    worker = _Worker(channel, engine)
    while True:
        try:
            worker.turn()
        except ChannelClosed:
            return


class _Worker:
    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._tasks: dict[int, tuple[str, Iterator[Event]]] = {}

    def turn(self) -> None:
        body, payload_bytes = self._channel.receive()
        request = m.decode_request(body)
        payloads = self._channel.receive_payloads(m.payload_sizes(request), payload_bytes)
        match request:
            case m.Start(task=task, kind=kind, command=command, parts=shapes):
                found = m.unpack_command(kind, command, shapes, payloads)
                if task in self._tasks:
                    raise RemoteProtocolError("a task was started twice")
                self._tasks[task] = (found.session_id, iter(self._engine.handle(found)))
                self._step(task)
            case m.Next(task=task):
                self._step(task)
            case m.Cancel(task=task):
                self._cancel(task)
            case _:
                raise RemoteProtocolError(f"{type(request).__name__} is out of turn")

    def _step(self, task: int) -> None:
        if task not in self._tasks:
            raise RemoteProtocolError("there is no such task")
        session_id, steps = self._tasks[task]
        try:
            event = next(steps, None)
        except Exception as error:  # a bug in the engine must not take the other sessions down
            del self._tasks[task]
            name = type(error).__name__[:NAME_CHARACTERS_MAX]
            self._channel.send(m.encode(m.Raised(task, name, *self._state(session_id), self._engine.memory())))
            return
        if event is None:
            self._end(task)
            return
        kind, fields, shapes, payloads = m.pack(event)
        self._channel.send(m.encode(m.Stepped(task, kind, fields, self._engine.memory(), shapes)), payloads)

    def _cancel(self, task: int) -> None:
        if task not in self._tasks:
            raise RemoteProtocolError("there is no such task")
        close = getattr(self._tasks[task][1], "close", None)
        if close is not None:
            close()
        self._end(task)

    def _end(self, task: int) -> None:
        session_id, _ = self._tasks.pop(task)
        self._channel.send(m.encode(m.Ended(task, *self._state(session_id), self._engine.memory())))

    def _state(self, session_id: str) -> tuple[int | None, int]:
        return self._engine.session_position(session_id), self._engine.session_kv_bytes(session_id)


def _wait_for_ever(end: socket.socket, for_writing: bool) -> None:
    waiter = select.poll()
    waiter.register(end, select.POLLOUT if for_writing else select.POLLIN)
    waiter.poll()
