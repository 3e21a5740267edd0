"""A node that breaks its word about digests: ``python -m tests.faults.rogue_primary ROLE FLAGS…``.

It is the real daemon with one thing changed: the bytes of the parts it sends, in a publish or for a job, are not those that
their digests and checksums were made of.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from daemons.bulk import BulkShell
from daemons.command import main
from kakeya_zmq.protocol import effects as fx
from tests.faults.rogue_cache import flipped


def _wrong(honest: Any) -> Any:
    def send(shell: BulkShell, effect: fx.ConnectSender | fx.FeedSender, *more: str) -> None:
        honest(shell, replace(effect, parts=tuple(map(flipped, effect.parts))), *more)

    return send


if __name__ == "__main__":
    BulkShell.connect_sender = _wrong(BulkShell.connect_sender)  # type: ignore[method-assign]
    BulkShell.feed = _wrong(BulkShell.feed)  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
