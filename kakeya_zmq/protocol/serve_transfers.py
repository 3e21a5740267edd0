"""The transfers that a cache service has open: their lanes, their requests, and how many there may be.

A lane that was bound stays in the table, and counts against the bounds, until it has finished, also when its request ended
long before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, assert_never

from kakeya_zmq.protocol.effects import LaneId, RequestKey
from kakeya_zmq.protocol.serve_values import Incoming, Outgoing, Transfer, TransferPhase
from kakeya_zmq.store import BlockStore
from wire import limits
from wire.ids import LeaseId

PARTS_ON_THE_WAY_BYTES_MAX: Final = 32 * limits.MIB
"""Of one peer, of all that it publishes at a time; parts of real models have less than 1 MiB each."""


class Transfers:
    """See the module's text.

    Args:
        store: whose leases end with the requests.
        lanes_max, lanes_per_node_max: transfers at one time, in all and for one peer.
    """

    def __init__(self, store: BlockStore, *, lanes_max: int, lanes_per_node_max: int) -> None:
        self._store = store
        self._lanes_max = lanes_max
        self._lanes_per_node_max = lanes_per_node_max
        self._transfers: dict[LaneId, Transfer] = {}
        self._open: dict[RequestKey, LaneId] = {}
        """Requests that have not ended; exactly the transfers that are not CLOSING."""

    def __len__(self) -> int:
        return len(self._transfers)

    def find(self, lane: LaneId) -> Transfer | None:
        """The transfer of a lane that has not finished."""
        return self._transfers.get(lane)

    def lane_of(self, key: RequestKey) -> LaneId | None:
        """The lane of a request that has not ended."""
        return self._open.get(key)

    def under_way(self) -> Iterator[tuple[LaneId, Transfer]]:
        """Those whose requests have not ended."""
        return (entry for entry in self._transfers.items() if entry[1].phase is not TransferPhase.CLOSING)

    def offers(self) -> Iterator[Incoming]:
        """Publishes under way."""
        return (transfer for _, transfer in self.under_way() if isinstance(transfer, Incoming))

    def releasing(self, lease_id: LeaseId) -> bool:
        """A lease was given back: whether it has to stay until the fetches that send its parts have ended."""
        sending = self._sending(lease_id)
        for transfer in sending:
            transfer.lease_given_back = True
        return bool(sending)

    def is_given_back(self, lease_id: LeaseId) -> bool:
        """Whether a lease only stays for the fetches under way."""
        return any(transfer.lease_given_back for transfer in self._sending(lease_id))

    def _sending(self, lease_id: LeaseId) -> list[Outgoing]:
        outgoing = (transfer for _, transfer in self.under_way() if isinstance(transfer, Outgoing))
        return [transfer for transfer in outgoing if transfer.lease_id == lease_id]

    def refusal(self, account: str) -> str | None:
        """Why somebody may not have one more, or None."""
        if len(self._transfers) >= self._lanes_max:
            return f"all {self._lanes_max} transfers of this node are in use"
        if sum(transfer.account == account for transfer in self._transfers.values()) >= self._lanes_per_node_max:
            return f"all {self._lanes_per_node_max} transfers allowed for one peer are in use"
        return None

    def receiving_refusal(self, account: str, largest_part_bytes: int) -> str | None:
        """Why somebody may not begin one more publish, whose largest part has so many bytes; or None.

        Parts that are on their way are in memory beside the store, until they are whole. A part may have any size that the
        store takes, one at a time.
        """
        of_account = [each for each in self._transfers.values() if isinstance(each, Incoming) and each.account == account]
        under_way = sum(each.largest_part_bytes for each in of_account)
        if of_account and under_way + largest_part_bytes > PARTS_ON_THE_WAY_BYTES_MAX:
            return f"parts on their way from one peer may have {PARTS_ON_THE_WAY_BYTES_MAX} bytes together"
        return None

    def begin(self, lane: LaneId, transfer: Transfer) -> None:
        self._open[transfer.key] = lane
        self._transfers[lane] = transfer

    def end(self, lane: LaneId) -> None:
        """The request has ended: give back what it held; the lane stays until it has finished."""
        transfer = self._transfers[lane]
        transfer.phase = TransferPhase.CLOSING
        del self._open[transfer.key]
        match transfer:
            case Incoming(held_lease_id=lease_id):
                if lease_id is not None:
                    self._store.release(lease_id)
            case Outgoing(lease_id=lease_id):
                transfer.lease_id = None
                if lease_id is not None and transfer.lease_given_back and not self.is_given_back(lease_id):
                    self._store.release(lease_id)
            case _:
                assert_never(transfer)

    def forget(self, lane: LaneId) -> None:
        """The lane has finished."""
        del self._transfers[lane]
