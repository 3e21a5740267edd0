"""A primary that gives KV which is not that of the prompt: ``python -m tests.attacks.poisoner primary FLAGS…``.

It is the real daemon, with the tenant's key and the right hashes; digests and checksums fit what it sends.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from daemons.bulk import BulkShell
from daemons.command import main
from kakeya_zmq.blocks import Part, part_checksum
from kakeya_zmq.protocol.effects import FeedSender
from kakeya_zmq.protocol.publish import Publisher


def poisoned(part: Part) -> Part:
    """Other numbers of the same size: the model goes on, and says something else."""
    numbers = np.frombuffer(part.payload, np.float32)
    payload = np.ascontiguousarray(numbers[::-1] * np.float32(-3.0)).tobytes()
    digest = hashlib.sha256(payload).digest()
    meta = msgspec.structs.replace(part.meta, digest=digest, checksum=part_checksum(payload))
    return replace(part, meta=meta, payload=memoryview(payload))


def _poisoning(honest: Any) -> Any:
    def publish(publisher: Publisher, parts: Sequence[Part], *others: Any) -> Any:
        return honest(publisher, [poisoned(part) for part in parts], *others)

    return publish


def _serving(honest: Any) -> Any:
    def feed(shell: BulkShell, effect: FeedSender) -> None:
        honest(shell, replace(effect, parts=tuple(map(poisoned, effect.parts))))

    return feed


if __name__ == "__main__":
    BulkShell.feed = _serving(BulkShell.feed)  # type: ignore[method-assign]
    Publisher.publish = _poisoning(Publisher.publish)  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
