"""Counters, gauges and lines: what a node can tell about its work.

Plain containers, owned by one thread (the reactor's); readers get snapshots. Nothing in here may hold a prompt, a token, a
hash, a key or an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from wire.errors import LocalProtocolError
from wire.limits import TEXT_CHARACTERS_MAX
from wire.messages import Explanation, SourceKind

Value: TypeAlias = int | float | str | bool | None

PREFILL_COUNTERS: Final = (
    "local_hits",
    "remote_hits",
    "misses",
    "tokens_reused",
    "tokens_computed",
    "bytes_received",
    "remote_jobs",
    "remote_job_failures",
    "fallbacks",
    "publish_attempts",
    "publish_successes",
    "publish_failures",
    "bytes_published",
    "hot_promotions",
    "hot_promotion_bytes",
    "hot_promotion_failures",
)
"""Monotone counters of a primary's ``prefill`` section. All start at 0, so that a reader need not guess which exist."""

PREFILL_VALUES: Final[Mapping[str, Value]] = {
    "remote_job_tokens_total": 0,
    "remote_job_tokens_computed": 0,
    "last_fallback_reason": "",
    "last_publish_error": "",
}
"""Values of the ``prefill`` section that are set, not added to; the two gauges describe the current or last job."""

NAMES_MAX: Final = 512
"""Distinct names in one :class:`Counters`: a name made out of data would grow it without end."""


class Counters:
    """Named figures of one section. Counters only grow; values are replaced."""

    def __init__(self, counters: Iterable[str] = (), values: Mapping[str, Value] | None = None) -> None:
        self._figures: dict[str, Value] = dict.fromkeys(counters, 0)
        self._figures.update(values or {})

    @classmethod
    def for_prefill(cls) -> Counters:
        """A section with every name of the ``prefill`` section present."""
        return cls(PREFILL_COUNTERS, PREFILL_VALUES)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter.

        Raises:
            LocalProtocolError: the amount is negative, the name belongs to a text, or there are too many names.
        """
        current = self._figures.get(name, 0)
        if amount < 0 or not isinstance(current, int):
            raise LocalProtocolError(f"counter {name} cannot take {amount}")
        self._admit(name)
        self._figures[name] = current + amount

    def set(self, name: str, value: Value) -> None:
        """Replace a value; texts are cut to ``TEXT_CHARACTERS_MAX``.

        Raises:
            LocalProtocolError: there are too many names.
        """
        self._admit(name)
        self._figures[name] = value[:TEXT_CHARACTERS_MAX] if isinstance(value, str) else value

    def get(self, name: str) -> Value:
        return self._figures.get(name, 0)

    def snapshot(self) -> dict[str, Value]:
        """A copy, names sorted."""
        return dict(sorted(self._figures.items()))

    def _admit(self, name: str) -> None:
        if name not in self._figures and len(self._figures) >= NAMES_MAX:
            raise LocalProtocolError(f"more than {NAMES_MAX} counter names")


_SOURCE_NAMES: Final[Mapping[SourceKind, str]] = {
    SourceKind.COMPUTED: "computed here",
    SourceKind.HOT: "own cache",
    SourceKind.REMOTE_CACHE: "cache of",
    SourceKind.WORKER: "prefill by",
    SourceKind.LIVE: "session",
}


def explanation_line(explanation: Explanation) -> str:
    """An explanation in one line for people, at most ``TEXT_CHARACTERS_MAX`` characters."""
    stretches = ", ".join(
        f"[{source.start}, {source.end}) {_SOURCE_NAMES[source.kind]}{' ' + source.node_id if source.node_id else ''}"
        for source in explanation.sources
        if source.end > source.start
    )
    nothing = "nothing was prepared" if explanation.prompt_tokens > 1 else "nothing to do"
    line = f"{explanation.prompt_tokens} tokens in {explanation.elapsed_ms:.0f} ms: {stretches or nothing}"
    if explanation.reasons:
        line += f"; {'; '.join(explanation.reasons)}"
    return line[:TEXT_CHARACTERS_MAX]


# --- what may leave the fleet -----------------------------------------------------------------------------------------

_ADDRESS: Final = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?(?![\w.]*\w)"  # IPv4
    r"|\[[0-9A-Fa-f:.%\w]*:[0-9A-Fa-f:.%\w]*\](?::\d{1,5})?"  # IPv6 in brackets
    r"|(?<![\w:])(?=[0-9A-Fa-f:]*(?:::|(?::[0-9A-Fa-f]{0,4}){3}))[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])"  # IPv6
    r"|(?<![\w.-])[A-Za-z][\w-]*(?:\.[\w-]+)*:\d{2,5}(?!\w)"  # a host name and a port
)
_DIGEST: Final = re.compile(r"\b[0-9A-Fa-f]{32,}\b")
_UNBOUNDED_MS: Final = 1e12


def public_text(text: str) -> str:
    """A line that readers of telemetry may see: without network addresses and digests, at most TEXT_CHARACTERS_MAX long."""
    return _DIGEST.sub("(digest)", _ADDRESS.sub("(address)", text[: 2 * TEXT_CHARACTERS_MAX]))[:TEXT_CHARACTERS_MAX]


def bounded_ms(value: float) -> float:
    """A time or rate as events carry them: finite, from 0 to 1e12, three digits after the point."""
    if not value > 0:  # also when it is no number
        return 0.0
    return round(min(value, _UNBOUNDED_MS), 3)
