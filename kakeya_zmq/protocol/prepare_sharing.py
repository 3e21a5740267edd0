"""What one preparation has to do with other sessions that prepare the same prefix: it waits for them, and tells them.

It puts waiting (.following) and telling (.outlook) together, and stands for neither where nothing is shared: then nobody is
waited for, and nobody is told anything.
"""

from __future__ import annotations

from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import Effect
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.following import Following
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.outlook import Outlook, Way
from kakeya_zmq.protocol.prepare_engine import EngineSession
from kakeya_zmq.protocol.prepare_phases import Phase
from kakeya_zmq.protocol.prepare_values import PreparationTask
from kakeya_zmq.store import BlockStore

WAITING = (Phase.FOLLOW, Phase.REJOIN)
"""The phases in which a preparation waits for another session."""


class Sharing:
    """The sharing of one preparation.

    Args:
        flights: the preparations of the same primary; None: nothing is shared.
        store: the local store, through which parts are shared; None: nothing is.
    """

    def __init__(
        self,
        task: PreparationTask,
        holdings: Holdings,
        rates: MeasuredRates,
        flights: Flights | None,
        store: BlockStore | None,
    ) -> None:
        self._following = (
            Following(task, holdings, rates, flights, store) if flights is not None and store is not None else None
        )
        self._outlook = Outlook(task, holdings, rates)

    @property
    def waiting(self) -> bool:
        return self._following is not None and self._following.waiting

    @property
    def at_hand(self) -> int:
        """Tokens of this prompt that are there while it waits for another session."""
        return 0 if self._following is None else self._following.at_hand

    def has_news(self) -> bool:
        """Whether what is waited for has changed since the last look."""
        return self._following is not None and self._following.has_news()

    def deadline(self) -> float | None:
        return None if self._following is None else self._following.deadline()

    def start(self, at_hand: int, now: float) -> list[Effect]:
        """Wait for another session, if there is one for which it pays; ``waiting`` tells."""
        return [] if self._following is None else self._following.start(at_hand, now)

    def rejoin(self, at_hand: int, now: float) -> list[Effect]:
        """No worker brings the rest: wait for another session after all; ``waiting`` tells."""
        return [] if self._following is None else self._following.rejoin(at_hand, now)

    def look(self, at_hand: int, now: float) -> list[Effect]:
        """Is it still worth waiting? ``waiting`` tells."""
        return [] if self._following is None else self._following.look(at_hand, now)

    def tell(self, phase: Phase, engine: EngineSession, way: Way | None, now: float, *, stopped: bool) -> None:
        """Let the others know what this one brings; worked out only when somebody listens.

        Args:
            way: what brings parts from elsewhere in this phase.
            stopped: nothing more will come into the store.
        """
        following = self._following
        if following is None or phase in WAITING:
            return
        if stopped or following.followed or not self._outlook.is_told(phase):
            begin = engine.imported.position if engine.imported is not None else engine.position
            following.tell(self._outlook.forecast(phase, engine.position, begin, way, now, stopped=stopped))

    def leave(self) -> None:
        """The preparation has ended."""
        if self._following is not None:
            self._following.leave()
