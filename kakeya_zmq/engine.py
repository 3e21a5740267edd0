"""The engine's interface: commands in, a stream of small events out; imports no model library.

One implementation runs MLX on the model thread (kakeya_zmq.model.engine), another may run in a child process. An engine
holds many sessions at once. ``handle`` returns an iterator; each ``next()`` does one bounded step (import, one prefill
segment, one decode step) and yields one event, so that a runner can interleave sessions and stop between steps. Closing
the iterator cancels the rest. Engines know token positions, never hashes, stores or peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.compat import Compatibility
from wire.limits import PART_BYTES_MAX
from wire.messages import PartKind, Requirement, StopReason

TokenArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the loaded model is, as the rest of the system needs to know it."""

    compatibility: Compatibility
    requirement: Requirement
    part_bytes_per_token: tuple[int, int, int]
    """Bytes of one token in a FULL, WINDOW part; bytes of a whole STATE part."""
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    vocabulary_size: int
    weight_bytes: int
    raw_bytes_per_token: tuple[int, int] = (0, 0)
    """Bytes of one token in a FULL, WINDOW part before a storage codec packed it; 0: parts are stored as they are."""
    state_part_bytes: int = 0
    """Exact size of a stored STATE part; 0: it varies from part to part, or the model has none."""

    def part_bytes_range(self, kind: PartKind, token_count: int) -> tuple[int, int]:
        """Least and most bytes that a stored part of this model can have."""
        if kind is PartKind.STATE:
            exact = self.state_part_bytes
            return (exact, exact) if exact else (1, PART_BYTES_MAX)
        raw_bytes = self.raw_bytes_per_token[kind] * token_count
        if not raw_bytes:
            exact = self.part_bytes_per_token[kind] * token_count
            return exact, exact
        # No codec packs noise into much more than it is: zlib's worst case is below an eighth, headers take a few bytes.
        return 1, min(PART_BYTES_MAX, raw_bytes + raw_bytes // 8 + 256)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What the model's library holds, in bytes: what is in use (weights, sessions, work), and what it keeps for reuse."""

    active_bytes: int = 0
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy; top_p 0 and top_k 0 mean off; the seed makes a run repeatable."""

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int | None = None


# --- commands --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSession:
    session_id: str


@dataclass(frozen=True, slots=True)
class ImportPrefix:
    """Replace the session's KV by the state after ``position`` tokens, built from ``parts``.

    ``parts`` are those that :func:`kakeya_zmq.blocks.needed_parts` names for ``position``, sorted by (start, kind). The rows
    of the last block may reach beyond ``position``: only its beginning is taken.
    A failed import leaves the session empty at position 0.
    """

    session_id: str
    position: int
    parts: tuple[RawPart, ...]


@dataclass(frozen=True, slots=True)
class BeginImport:
    """Start to build the state after ``position`` tokens beside the session's KV, which stays as it is until FinishImport.

    AddParts then brings the parts as they arrive. An import that is begun anew, or followed by any other command than
    AddParts and FinishImport, is forgotten. Answered by ImportAdvanced.
    """

    session_id: str
    position: int


@dataclass(frozen=True, slots=True)
class AddParts:
    """Copy parts into the import that was begun; any order, each part once. Answered by ImportAdvanced."""

    session_id: str
    parts: tuple[RawPart, ...]


@dataclass(frozen=True, slots=True)
class FinishImport:
    """Replace the session's KV by what was imported. Answered by PrefixImported; fails when parts are missing.

    A failure in any of the three commands leaves the session's KV as it was before BeginImport.
    """

    session_id: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run ``tokens`` through the model from the session's position on, in segments on the absolute grid.

    ``tokens[0]`` is at the session's position. With ``capture`` each SegmentComputed carries the parts that became
    complete: every full block, and at the very end a tail if the last position is not on the block grid.
    """

    session_id: str
    tokens: TokenArray
    capture: bool = True


@dataclass(frozen=True, slots=True)
class Decode:
    """Run ``last_token`` (the one prompt token whose KV is not there yet), then decode up to ``max_tokens``.

    After it, the session's position counts every token whose KV it holds. The token sampled last has no KV yet: a
    following Prefill or Decode starts with it.
    """

    session_id: str
    last_token: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Capture:
    """Export the parts of tokens [start, session position) that the session still holds: blocks, then a tail."""

    session_id: str
    start: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    session_id: str


Command: TypeAlias = (
    OpenSession | ImportPrefix | BeginImport | AddParts | FinishImport | Prefill | Decode | Capture | CloseSession
)


KV_NOT_ENCODED = (
    "the KV cache holds values that are not finite, which --cache-compression cannot store: use none or zlib on every node"
)
"""What to tell the user when parts could not be encoded."""


# --- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionReady:
    """OpenSession and CloseSession are done."""

    session_id: str


@dataclass(frozen=True, slots=True)
class ImportAdvanced:
    """BeginImport or AddParts is done; ``elapsed_ms`` of this step."""

    session_id: str
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class PrefixImported:
    session_id: str
    position: int
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class SegmentComputed:
    """One prefill segment is done; the session now stands at ``position``."""

    session_id: str
    position: int
    parts: tuple[RawPart, ...]
    elapsed_ms: float
    parts_not_encoded: int = 0
    """Parts that should be there and could not be stored by the codec."""


@dataclass(frozen=True, slots=True)
class TokenDecoded:
    session_id: str
    token: int


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """``position`` = tokens whose KV the session holds."""

    session_id: str
    stop_reason: StopReason
    position: int


@dataclass(frozen=True, slots=True)
class PartsCaptured:
    session_id: str
    parts: tuple[RawPart, ...]
    parts_not_encoded: int = 0
    """Parts that should be there and could not be stored by the codec."""


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """The command ended early; ``message`` is one line for users. The session stands at ``position``."""

    session_id: str
    message: str
    position: int


Event: TypeAlias = (
    SessionReady
    | ImportAdvanced
    | PrefixImported
    | SegmentComputed
    | TokenDecoded
    | DecodeFinished
    | PartsCaptured
    | CommandFailed
)


class Engine(Protocol):
    """What runs a model. All methods are called on one thread."""

    @property
    def facts(self) -> ModelFacts: ...

    def handle(self, command: Command) -> Iterator[Event]: ...

    def session_kv_bytes(self, session_id: str) -> int: ...

    def session_position(self, session_id: str) -> int | None:
        """Tokens whose KV the session holds, also after a command that was closed early; None for an unknown session."""
        ...

    def memory(self) -> EngineMemory:
        """What the model takes of the machine's memory now."""
        ...

    def close(self) -> None: ...
