"""Which caches a model runs with. Needs no MLX: settings name a policy before MLX is imported."""

from __future__ import annotations

from dataclasses import dataclass

from wire.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """Which caches a model runs with: its own, or bounded to ``sink_tokens`` + ``window_tokens`` (0, 0: its own)."""

    sink_tokens: int
    window_tokens: int

    @classmethod
    def native(cls) -> CachePolicy:
        return cls(sink_tokens=0, window_tokens=0)

    @classmethod
    def sink_window(cls, sink: int, window: int) -> CachePolicy:
        """Raises:
        InvalidInput: ``sink`` is negative or ``window`` not positive.
        """
        if sink < 0 or window < 1:
            raise InvalidInput(f"sink must be >= 0 and window >= 1 token, not {sink} and {window}")
        return cls(sink_tokens=sink, window_tokens=window)

    @property
    def bounded(self) -> bool:
        return self.window_tokens > 0
