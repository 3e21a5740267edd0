"""How a failure that ends here is told in the log."""

from __future__ import annotations

import os
import traceback

from wire.errors import KakeyaError


def describe_exception(error: BaseException) -> str:
    """One line for the log: type and place. The text of a foreign exception may hold user data, so it is left out."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    place = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames))
    text = f": {error}" if isinstance(error, KakeyaError) else ""
    return f"{type(error).__name__}{text} at {place}"
