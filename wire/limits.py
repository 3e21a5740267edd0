"""Every bound of the protocol in one place, each with its reason; :func:`check_limits` holds them against each other."""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

PROTOCOL_VERSION: Final = 1

# --- control plane ---------------------------------------------------------------------------------------------
PROMPT_TOKENS_MAX: Final = 131_072
"""Longest prompt of one job or append: the longest context of the models this is built for."""
TOKEN_BYTES: Final = 4
"""Tokens travel as packed little-endian int32."""
BLOCK_TOKENS_DEFAULT: Final = 64
BLOCK_TOKENS_MIN: Final = 16
"""Smaller blocks cost more in hashes and parts than they save in recomputed tokens."""
BLOCK_TOKENS_MAX: Final = 1024
HASH_BYTES: Final = 32
BLOCKS_MAX: Final = PROMPT_TOKENS_MAX // BLOCK_TOKENS_MIN
"""Blocks of one prompt: 8,192 hashes of 32 bytes are 256 KiB in one lookup."""
CONTROL_MESSAGE_BYTES_MAX: Final = 1 * MIB
"""Largest control frame: a job for the longest prompt is 512 KiB of tokens."""
CONTROL_BODY_BYTES_MAX: Final = CONTROL_MESSAGE_BYTES_MAX - 4 * KIB
"""Largest msgpack body before sealing."""
BUS_MESSAGE_BYTES_MAX: Final = 64 * KIB
CARD_BYTES_MAX: Final = 16 * KIB
CARDS_PER_EXCHANGE_MAX: Final = 48
"""So that a full exchange of the largest cards (768 KiB) fits in one control message."""
ANSWER_BYTES_MAX: Final = 64 * KIB
"""Of cards or records in one answer, and of cards that an answer wanted. Who asks again and again and never reads makes a
node keep a queue of them; what does not fit comes with the next exchange."""
STATUS_BYTES_MAX: Final = 128 * KIB
"""Of one answer to GetStatus: about 40 KiB of figures and notes at most, and a row each of some 200 nodes. A node keeps as
many unread ones as other answers; and what it knows of 1,024 nodes, whose cards others wrote, would fit in no message."""
NOTES_BYTES_MAX: Final = 16 * KIB
"""Of the last lines in a status: a hundred of usual length."""
REVOCATION_BYTES_MAX: Final = 2 * KIB
"""Two names at their longest, two keys, a signature."""
REVOCATIONS_MAX: Final = 1024
"""Revoked keys a fleet remembers."""
REVOCATIONS_PER_EXCHANGE_MAX: Final = 16
CARD_DIGEST_BYTES_MAX: Final = 1025 * 24
"""As many live cards as a node keeps, and its own, in a digest of 24 bytes each."""
TAILS_PER_PARENT_MAX: Final = 8
"""Tails remembered under one parent block; more would make a lookup reply grow with traffic."""
SESSIONS_MAX: Final = 1024
"""Control sessions a server keeps; a session is under 1 KiB."""
REQUEST_RECORDS_MAX: Final = 256
"""Finished requests a primary remembers; a record takes a few KiB, at most as much as a bus message."""
REQUESTS_IN_FLIGHT_MAX: Final = 256
"""Open requests of one control session."""
NAME_CHARACTERS_MAX: Final = 128
"""Node ids, model ids, labels and other names."""
TEXT_CHARACTERS_MAX: Final = 512
"""Reasons and error lines."""

# --- bulk plane ------------------------------------------------------------------------------------------------
CHUNK_BYTES_DEFAULT: Final = 2 * MIB
CHUNK_BYTES_MIN: Final = 64 * KIB
CHUNK_BYTES_MAX: Final = 4 * MIB
"""Measured: 1 to 4 MiB reach the plateau of ZeroMQ over TCP; larger ones only cost memory."""
CHUNK_OVERHEAD_BYTES: Final = 4 * KIB
LINK_FRAME_BYTES: Final = 16
"""What a link encoding adds to bytes that it cannot make smaller (the header of its frame)."""
PART_BYTES_MAX: Final = 1 * GIB
"""One block's K/V of one layer group; the largest real models are near 32 MiB."""
PARTS_PER_MANIFEST_MAX: Final = 4096
MANIFEST_BYTES_MAX: Final = 1 * MIB
TRANSFER_BYTES_MAX: Final = 64 * GIB
CREDIT_BYTES_DEFAULT: Final = 64 * MIB
"""Bytes a sender may have sent that the receiver has not processed. So that most transfers need no more credit, each grant
of which takes a turn on both sides; what either side holds of them in memory is bounded by its queues, a few chunks."""
SLOWEST_LINK_BYTES_PER_S: Final = 128 * KIB
"""The slowest link for which a transfer is kept open: over a slower one nobody waits for KV."""
PARTS_PER_REQUEST_MAX: Final = 16_384
"""Part references in one fetch or offer; 48 bytes each as encoded, so the message stays under its cap."""

# --- time, milliseconds ------------------------------------------------------------------------------------------
HANDSHAKE_INTERVAL_MS: Final = 5_000
LEASE_MS_DEFAULT: Final = 30_000


def check_limits() -> None:
    """Hold the limits against each other; called by a test and by every daemon at start.

    Raises:
        AssertionError: two limits contradict each other.
    """
    assert PROMPT_TOKENS_MAX * TOKEN_BYTES + BLOCKS_MAX * HASH_BYTES <= CONTROL_BODY_BYTES_MAX
    exchanged = CARDS_PER_EXCHANGE_MAX * CARD_BYTES_MAX + REVOCATIONS_PER_EXCHANGE_MAX * REVOCATION_BYTES_MAX
    assert exchanged + CARD_DIGEST_BYTES_MAX + REVOCATIONS_MAX * 8 <= CONTROL_BODY_BYTES_MAX
    assert CARD_BYTES_MAX < BUS_MESSAGE_BYTES_MAX
    assert CARD_BYTES_MAX <= ANSWER_BYTES_MAX <= STATUS_BYTES_MAX <= CONTROL_BODY_BYTES_MAX
    assert PARTS_PER_REQUEST_MAX * 48 <= CONTROL_BODY_BYTES_MAX
    assert CHUNK_BYTES_MIN <= CHUNK_BYTES_DEFAULT <= CHUNK_BYTES_MAX <= CREDIT_BYTES_DEFAULT
    assert MANIFEST_BYTES_MAX <= CHUNK_BYTES_MAX
    assert LINK_FRAME_BYTES < CHUNK_OVERHEAD_BYTES
    assert PART_BYTES_MAX <= TRANSFER_BYTES_MAX
    assert BLOCK_TOKENS_MIN <= BLOCK_TOKENS_DEFAULT <= BLOCK_TOKENS_MAX
