"""The commands of engine sessions, one queue for each, as the engine's runner keeps them (kakeya_zmq.engine_runner)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kakeya_zmq.engine import Command, Event
from kakeya_zmq.protocol.effects import Ticket


@dataclass
class Task:
    """One command. ``steps`` None: it has not begun."""

    ticket: Ticket
    command: Command
    steps: Iterator[Event] | None = None
    cancelled: bool = False


class EngineQueues(dict[str, deque[Task]]):
    """By engine session."""

    def put(self, ticket: Ticket, command: Command) -> None:
        self.setdefault(command.session_id, deque()).append(Task(ticket, command))

    def cancel(self, ticket: Ticket) -> None:
        next(task for queue in self.values() for task in queue if task.ticket == ticket).cancelled = True

    def step(self, choice: int, run: Callable[[Command], Iterator[Event]]) -> tuple[str, Task, Event | None] | None:
        """One step of one session; None when there is nothing to do.

        Args:
            choice: which of the sessions that have something to do.
            run: carries a command out.

        Returns:
            The session, its command, and what the step brought; None for that when the command has ended with it, be it
            cancelled: then it is out of its queue.
        """
        busy = [name for name, queue in self.items() if queue]
        if not busy:
            return None
        name = busy[choice % len(busy)]
        queue = self[name]
        cancelled = next((task for task in queue if task.cancelled), None)
        task = cancelled or queue[0]
        event = None
        if cancelled is None:
            task.steps = task.steps or run(task.command)
            event = next(task.steps, None)
        if event is None:
            queue.remove(task)
        return name, task, event
