"""``python -m tests.deploy.hanging_primary primary …``: a primary that loads slowly and hangs while it decodes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from daemons.command import main
from kakeya_zmq.engine import Command, Decode, Engine, Event
from kakeya_zmq.engine_runner import EngineRunner

SLOW_LOAD_S = 2.0
TOKENS_BEFORE_HANG = 3


def hanging(factory: Callable[[], Engine]) -> Callable[[], Engine]:
    def build() -> Engine:
        time.sleep(SLOW_LOAD_S)
        engine: Any = factory()
        handle = engine.handle

        def handle_and_hang(command: Command) -> Iterator[Event]:
            for number, event in enumerate(handle(command)):
                if isinstance(command, Decode) and number == TOKENS_BEFORE_HANG:
                    threading.Event().wait()
                yield event

        engine.handle = handle_and_hang
        return engine

    return build


if __name__ == "__main__":
    original = EngineRunner.__init__

    def patched(self: EngineRunner, engine_factory: Callable[[], Engine], *arguments: Any, **named: Any) -> None:
        original(self, hanging(engine_factory), *arguments, **named)

    EngineRunner.__init__ = patched  # type: ignore[method-assign]
    sys.exit(main())
