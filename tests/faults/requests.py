"""Requests that run on a thread of their own, so that the test can break something meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from kakeya_zmq.client import Client
from tests.fleet_rig import Answer, ask
from wire.messages import PrefillProgress, SourceKind

COUNT = 12
"""Tokens of each answer."""


class Asking:
    """An append and a generation."""

    def __init__(self, client: Client, tokens: Sequence[int], deadline_s: float, **options: Any) -> None:
        self._client = client
        self._tokens = tokens
        self._deadline_s = deadline_s
        self._options = options
        self._found: Answer | BaseException | None = None
        self._elapsed_s = 0.0
        self.working = threading.Event()
        """Set with the first sign that a worker has computed something."""
        self._thread = threading.Thread(target=self._run, name="asking")
        self._thread.start()

    def _run(self) -> None:
        def progressed(progress: PrefillProgress) -> None:
            if progress.source is SourceKind.WORKER and progress.tokens_done > 0:
                self.working.set()

        begun = time.monotonic()
        try:
            with self._client.create_session(**self._options) as session:
                self._found = ask(session, self._tokens, COUNT, self._deadline_s, on_progress=progressed)
        except BaseException as error:  # whatever it was, the test's thread must see it
            self._found = error
        self._elapsed_s = time.monotonic() - begun

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Answer:
        """The answer; fails when it does not come by the deadline, or what was raised instead."""
        self._thread.join(2 * self._deadline_s)
        assert not self._thread.is_alive(), "the request hangs"
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        assert self._elapsed_s <= self._deadline_s, f"the answer took {self._elapsed_s:.1f} s of {self._deadline_s:.0f} s"
        return self._found
