"""The phases of prompt preparation and how they may follow each other (kakeya_zmq.protocol.prepare)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Phase(enum.Enum):
    LOCAL = "looking at home"
    FOLLOW = "waiting for another session"
    GATHER = "asking caches"
    OFFLOAD = "waiting for a worker"
    REJOIN = "waiting for another session after all"
    IMPORT = "importing"
    COMPUTE = "computing the rest"
    FINISHED = "finished"


TRANSITIONS: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.LOCAL: frozenset({Phase.FOLLOW, Phase.GATHER, Phase.OFFLOAD, Phase.IMPORT, Phase.COMPUTE, Phase.FINISHED}),
    Phase.FOLLOW: frozenset({Phase.GATHER, Phase.OFFLOAD, Phase.IMPORT, Phase.COMPUTE, Phase.FINISHED}),
    Phase.GATHER: frozenset({Phase.OFFLOAD, Phase.IMPORT, Phase.COMPUTE, Phase.FINISHED}),
    Phase.OFFLOAD: frozenset({Phase.REJOIN, Phase.IMPORT, Phase.COMPUTE, Phase.FINISHED}),
    Phase.REJOIN: frozenset({Phase.IMPORT, Phase.COMPUTE, Phase.FINISHED}),
    Phase.IMPORT: frozenset({Phase.COMPUTE, Phase.FINISHED}),
    Phase.COMPUTE: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}
