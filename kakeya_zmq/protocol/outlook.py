"""What a preparation tells those that may wait for it: which parts it brings, how far it is, when it expects to be done."""

from __future__ import annotations

from typing import Protocol

from kakeya_zmq.blocks import needed_parts
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.estimates import Estimates
from kakeya_zmq.protocol.flights import Forecast, computed_parts
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.prepare_phases import Phase
from kakeya_zmq.protocol.prepare_values import PreparationTask
from wire.messages import PartRef


class Way(Protocol):
    """Gathering, or offloading."""

    @property
    def aim(self) -> Reach | None: ...

    def remaining_s(self, now: float) -> float: ...


class Outlook:
    """The forecasts of one preparation; what is promised is worked out once in a phase."""

    def __init__(self, task: PreparationTask, holdings: Holdings, rates: MeasuredRates) -> None:
        self._task = task
        self._holdings = holdings
        self._estimates = Estimates(task, rates, holdings.held_by)
        self._promised: frozenset[PartRef] = frozenset()
        self._phase: Phase | None = None

    def is_told(self, phase: Phase) -> bool:
        """Whether a forecast was made in this phase."""
        return self._phase is phase

    def forecast(self, phase: Phase, position: int, begin: int, way: Way | None, now: float, *, stopped: bool) -> Forecast:
        """What is to be expected.

        Args:
            position: tokens whose KV the session holds.
            begin: where computing here begins, or began.
            way: what brings parts from elsewhere in this phase.
            stopped: nothing more will come into the store.
        """
        remote = phase in (Phase.GATHER, Phase.OFFLOAD)
        if self._phase is not phase:
            self._phase = phase
            self._promised = self._promise(begin, remote=remote)
        promised: frozenset[PartRef] = frozenset() if stopped else self._promised
        target = self._task.target
        if remote:
            stands = max(position, self._holdings.reach(self._holdings.has).position)
            aim = way.aim if way is not None else None
            waiting_s = way.remaining_s(now) if way is not None else 0.0
            rest_ms = self._rest_ms(phase, aim.position if aim is not None else stands, stands)
        else:
            stands = max(position, begin)
            waiting_s, rest_ms = 0.0, self._estimates.compute_ms(target - stands)
        until = now + waiting_s + rest_ms / 1000.0
        return Forecast(promised, stands, target, now, until, here=not remote)

    def _rest_ms(self, phase: Phase, position: int, at_hand: int) -> float:
        """What is left behind ``position``: before the workers are asked, one of them may be quicker than this machine."""
        if phase is Phase.GATHER:
            return self._estimates.rest_ms(position, at_hand)
        return self._estimates.compute_ms(self._task.target - position)

    def _promise(self, begin: int, *, remote: bool) -> frozenset[PartRef]:
        task, requirement = self._task, self._task.facts.requirement
        if remote:
            return frozenset(needed_parts(task.chain, task.target, requirement))
        return computed_parts(task.chain, begin, requirement, task.settings.segment_tokens)
