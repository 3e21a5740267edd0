"""The ``kakeya`` program: interrupted while its modules are still being loaded, it ends as quietly as later."""

from __future__ import annotations

import sys


def main() -> int:
    """Load and run the command; its exit code."""
    try:
        from daemons.command import main as run
    except KeyboardInterrupt:
        sys.stderr.write("kakeya: interrupted\n")
        return 130
    return run()
