"""Which way to a prompt's KV: the options with what they cost, and the choice among them. Pure functions.

A route is one way from the KV at hand to all of the prompt's: compute it here, import what caches hold and compute the rest
here or by a worker, or have a worker do it all. What it costs is what its own steps take (``effort_ms``) plus what is then
still to be computed here (``rest_ms``).

Rules
 1. A route that uses the fleet is taken only when its effort is at most ``1 - minimum_savings_ratio`` of what the same
    tokens would cost here (``replaces_ms``); of those that pass, the cheapest one as a whole.
 2. The penalty for keeping decode waiting is shared out evenly over the tokens to compute: half of them here cost half of
    it, so that it does not hide what a partial import saves. A rest too small to ask anybody for has none.
 3. Where nothing may be computed here (remote-required), every route that computes nothing here passes, and no other.
 4. Among workers of like cost, within ALIKE, one that has proven itself before is taken.
 5. An option that was refused many times is now and then taken to measure it again (kakeya_zmq.planner.PassedOver).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya_zmq.planner import HERE, PassedOver
from wire import limits
from wire.ids import NodeId
from wire.messages import Decision

__all__ = ["HERE", "Route", "RouteChoice", "choose_route"]

ALIKE = 0.25
"""By this share of its cost a proven worker may be dearer than a newcomer, whose cost is its own word."""
COSTS_SHOWN_MAX = 16
"""Routes listed in one decision, the cheapest ones."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way. ``name`` tells it apart from the others of the same choice and is shown to users.

    ``text`` is the subject of a sentence about it, for example "importing 640 tokens (1.3 MB)".
    """

    name: str
    effort_ms: float
    replaces_ms: float
    rest_ms: float = 0.0
    imports: bool = False
    worker: NodeId | None = None
    proven: bool = True
    """The worker has shown before that it is one of the tenant's."""
    text: str = ""

    @property
    def cost_ms(self) -> float:
        return self.effort_ms + self.rest_ms

    @property
    def remote(self) -> bool:
        return self.imports or self.worker is not None

    def pays(self, minimum_savings_ratio: float) -> bool:
        return self.replaces_ms > 0 and self.effort_ms <= self.replaces_ms * (1.0 - minimum_savings_ratio)


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """``chosen`` is None only where nothing may be computed here and nobody else can. ``routes``: cheapest first."""

    chosen: Route | None
    routes: tuple[Route, ...]
    refused: tuple[Route, ...]
    """Routes over the fleet that do not save enough."""
    explored: bool = False

    def refusals(self) -> tuple[str, ...]:
        """A sentence with the numbers for each route over the fleet that does not pay."""
        return tuple(
            f"{route.text} does not pay: {route.effort_ms:.0f} ms against {route.replaces_ms:.0f} ms of prefill here"
            for route in self.refused[:COSTS_SHOWN_MAX]
        )

    def decision(self, what: str) -> Decision:
        """The choice as an explanation holds it."""
        shown = self.routes[:COSTS_SHOWN_MAX]
        costs = {route.name[: limits.TEXT_CHARACTERS_MAX]: round(route.cost_ms, 3) for route in shown}
        if self.chosen is None:
            chosen, text = "", "nobody else can prepare it"
        else:
            chosen = self.chosen.name[: limits.NAME_CHARACTERS_MAX]
            others = [route for route in shown if route is not self.chosen]
            text = f"{self.chosen.name}: {self.chosen.cost_ms:.0f} ms"
            if others:
                text += f" against {others[0].cost_ms:.0f} ms to {others[0].name}"
            if self.explored:
                text += ", to measure it again"
        return Decision(what=what, chosen=chosen, costs_ms=costs, text=text[: limits.TEXT_CHARACTERS_MAX])


def choose_route(
    routes: Sequence[Route],
    *,
    minimum_savings_ratio: float,
    remote_required: bool = False,
    passed_over: PassedOver | None = None,
) -> RouteChoice:
    """The cheapest route that may be taken.

    Args:
        routes: the options; the one called :data:`HERE` is always admissible, unless remote is required. Routes of the same
            cost are taken in the order given.
        minimum_savings_ratio: in [0, 1).
        remote_required: nothing may be computed here.
        passed_over: what was refused before; read and updated. None: nothing is explored.
    """
    ranked = tuple(sorted(routes, key=lambda route: route.cost_ms))
    if remote_required:
        able = [route for route in ranked if route.remote and route.rest_ms <= 0]
        return RouteChoice(_best(able) if able else None, ranked, ())
    refused = tuple(route for route in ranked if route.remote and not route.pays(minimum_savings_ratio))
    admitted = [route for route in ranked if route not in refused]
    if not admitted:
        return RouteChoice(None, ranked, refused)
    chosen, explored = _best(admitted), False
    if passed_over is not None:
        due = [route for route in ranked if passed_over.is_due(route.name, route.cost_ms, chosen.cost_ms)]
        if due:
            chosen, explored = due[0], due[0] is not chosen
        passed_over.note(chosen.name, [route.name for route in ranked if route is not chosen])
    return RouteChoice(chosen, ranked, tuple(route for route in refused if route is not chosen), explored)


def _best(ranked: Sequence[Route]) -> Route:
    """The cheapest, or a like one that is proven."""
    best = ranked[0]
    if best.worker is None or best.proven:
        return best
    likes = (
        route
        for route in ranked
        if route.worker is not None
        and route.proven
        and route.imports == best.imports
        and route.cost_ms <= best.cost_ms * (1 + ALIKE)
    )
    return next(likes, best)
