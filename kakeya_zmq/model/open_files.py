"""mlx_lm sets this process's limit on open files when it is imported: to 2,048, and to 4,096 at most from then on.

That is less than what a daemon has asked for by then, and an error where the system allows fewer than 4,096. So the import
is made with that call left out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def limit_kept() -> Iterator[None]:
    """Nothing changes a limit of this process meanwhile. For the time of an import."""
    if sys.platform == "win32":
        yield
        return
    import resource

    set_limit = resource.setrlimit
    resource.setrlimit = lambda kind, limits: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit
