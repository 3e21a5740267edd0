"""A daemon of the next protocol version: ``python -m tests.soak.next_protocol ROLE FLAGS…``; all else is as it is now."""

from __future__ import annotations

import sys

from daemons.command import main
from wire import limits

if __name__ == "__main__":
    limits.PROTOCOL_VERSION += 1  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
