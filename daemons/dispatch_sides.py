"""What the dispatcher joins, as far as it has to know it: a protocol machine, and the shell of the bulk lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kakeya_zmq.protocol import effects as fx


class Machine(Protocol):
    """What the dispatcher drives."""

    def on(self, event: Any, now: float) -> Sequence[Any]: ...

    def deadline(self) -> float | None: ...


class Lanes(Protocol):
    """The bulk shell (daemons.bulk)."""

    def bind_sender(self, effect: fx.BindSender) -> None: ...

    def connect_sender(self, effect: fx.ConnectSender, host: str) -> None: ...

    def bind_receiver(self, effect: fx.BindReceiver) -> None: ...

    def connect_receiver(self, effect: fx.ConnectReceiver, host: str) -> None: ...

    def feed(self, effect: fx.FeedSender) -> None: ...

    def add_credit(self, effect: fx.AddCredit) -> None: ...

    def close(self, effect: fx.CloseLane) -> None: ...
