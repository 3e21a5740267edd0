"""A fetching process for tests: ``python -m tests.loopback.lane_process <parts>``; the grant comes as hex on stdin.

Prints ``credit <bytes>`` while it receives, then ``done <ok> <SHA-256 of all parts in manifest order>``.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace

import msgspec

from kakeya_zmq.io.receiver import ReceiverLane
from kakeya_zmq.protocol.effects import CreditEarned, LaneFinished, LaneId, PartsReceived
from tests.loopback.lane_support import DEADLINE_S, HOST, Mailbox, clean_context, expected, make_part
from wire import limits
from wire.messages import TransferGrant


def main() -> None:
    count = int(sys.argv[1])
    grant = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline().strip()), type=TransferGrant)
    mailbox = Mailbox()

    def tell(event: object) -> None:
        if isinstance(event, CreditEarned):
            print("credit", event.credit_bytes, flush=True)

    mailbox.listeners.append(tell)
    with clean_context() as context:
        lane = ReceiverLane.connect(
            context,
            lane=LaneId(1),
            host=HOST,
            grant=grant,
            expected=[
                replace(part, bytes_max=limits.PART_BYTES_MAX)
                for part in expected([make_part(number, 1) for number in range(count)])
            ],
            budget_bytes=limits.GIB,
            idle_timeout_s=DEADLINE_S,
            post=mailbox.post,
            verify_digests=True,
        )
        finished = mailbox.wait_for(LaneFinished)
        lane.join(DEADLINE_S)
    digest = hashlib.sha256()
    for event in mailbox.seen:
        if isinstance(event, PartsReceived):
            for part in event.parts:
                digest.update(part.payload)
    print("done", finished.ok, digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
