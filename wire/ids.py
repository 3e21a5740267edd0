"""Names for the identifiers that travel on the wire, so that one cannot be passed for another."""

from typing import NewType

NodeId = NewType("NodeId", str)
"""Name of a node, unique in the fleet, bound to its Ed25519 identity key on first sight."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes: one secured control session between two processes (not a user's conversation)."""

RequestId = NewType("RequestId", int)
"""Number of a request inside one control session; chosen by the client, strictly increasing."""

LeaseId = NewType("LeaseId", bytes)
"""16 random bytes: keeps parts in a store from being evicted until released or expired."""

TransferId = NewType("TransferId", bytes)
"""16 random bytes: one bulk transfer, with one key and one socket."""

JobId = NewType("JobId", bytes)
"""16 random bytes chosen by the asker: one prefill job; repeating it is idempotent."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: chained HMAC of a token block, see kakeya_zmq.compat.chain_hashes."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes: SHA-256 of the compatibility tuple; names a KV namespace."""

InferenceSessionId = NewType("InferenceSessionId", str)
"""``sess-`` and 32 hex digits: a user's conversation on a primary."""
