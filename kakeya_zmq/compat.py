"""The compatibility tuple, its fingerprint, and the hash chain of a prompt.

Anything that differs in the tuple is another namespace: a miss, never a conversion. The tuple is derived from the loaded
model; what an operator passes for it is an assertion that is checked (:func:`check_assertions`), never a replacement.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from kakeya_zmq.blocks import ROOT_HASH, Block, Chain
from wire.errors import ConfigError, InvalidInput

CACHE_FORMAT_VERSION = "kakeya-zmq-v1"
"""Layout of parts as stored. A lossy codec appends its own name: another version, thus another namespace."""


TENANT_KEY_ID = "tenant_key_id"
"""Name under which a worker tells which tenant key it hashes with, beside the compatibility tuple."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What two nodes must share for one to use the other's KV. All fields are compared for equality."""

    model_id: str
    model_revision: str
    """SHA-256 over configuration and weights."""
    tokenizer_revision: str
    """SHA-256 over tokenizer files and chat template."""
    quantization: str
    kv_dtype: str
    cache_format_version: str
    rope_hash: str
    layer_geometry_hash: str
    block_size_tokens: int
    sink_size: int
    window_size: int
    """0 for the model's own cache policy."""
    tenant_namespace: str

    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 of the compact, key-sorted JSON of all fields."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).digest()

    def differences(self, other: Compatibility) -> tuple[str, ...]:
        """Names of the fields that differ, in declaration order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


def check_field_names(names: Iterable[str]) -> None:
    """Whether there are such compatibility fields.

    Raises:
        ConfigError: a field is unknown; the remedy has them all.
    """
    known = {f.name for f in fields(Compatibility)}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ConfigError(
            f"unknown compatibility field {', '.join(unknown)}", remedy=f"known fields: {', '.join(sorted(known))}"
        )


def check_assertions(derived: Compatibility, asserted: Mapping[str, str | int]) -> None:
    """Check an operator's values against the model's.

    Args:
        derived: the tuple of the loaded model.
        asserted: field name to value, only the fields the operator set.

    Raises:
        ConfigError: a field is unknown or differs; every differing field is named with both values.
    """
    check_field_names(asserted)
    wrong = [
        f"{name} is {getattr(derived, name)!r}, not {value!r}"
        for name, value in asserted.items()
        if getattr(derived, name) != value
    ]
    if wrong:
        raise ConfigError(
            f"the loaded model does not match what was asserted: {'; '.join(wrong)}",
            remedy="load the same model on every node, or drop the assertion",
        )


def chain_hashes(
    tokens: npt.NDArray[np.int32], fingerprint: bytes, tenant_key: bytes, block_tokens: int, *, tail: bool = True
) -> Chain:
    """Cut ``tokens`` into blocks and chain their hashes: h_i = HMAC-SHA256(tenant_key, fingerprint ‖ h_{i-1} ‖ tokens_i).

    The hash of the block before the first is 32 zero bytes; tokens are little-endian int32. A block shorter than
    ``block_tokens`` is hashed the same way (all other inputs have fixed width, so lengths can't be confused).

    Args:
        tokens: 1-D int32, any length.
        fingerprint: 32 bytes.
        tenant_key: at least 16 bytes.
        block_tokens: tokens in a full block, > 0.
        tail: whether a last, shorter block is kept.

    Raises:
        InvalidInput: block size, fingerprint or tenant key out of range; tokens not 1-D, or not int32.
    """
    if tokens.ndim != 1 or tokens.dtype.newbyteorder("<") != np.dtype("<i4"):
        raise InvalidInput("tokens must be one row of int32")
    if block_tokens <= 0:
        raise InvalidInput(f"block size must be positive, not {block_tokens}")
    if len(fingerprint) != 32 or len(tenant_key) < 16:
        raise InvalidInput("fingerprint must be 32 bytes and the tenant key at least 16")
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    blocks: list[Block] = []
    parent = ROOT_HASH
    keyed, outer_state = _hmac_states(tenant_key)
    keyed.update(fingerprint)
    for start in range(0, len(tokens), block_tokens):
        count = min(block_tokens, len(tokens) - start)
        if count < block_tokens and not tail:
            break
        inner, outer = keyed.copy(), outer_state.copy()
        inner.update(parent + data[4 * start : 4 * (start + count)])
        outer.update(inner.digest())
        digest = outer.digest()
        blocks.append(Block(digest, parent, start, count))  # by position: half the time, and a prompt has many
        parent = digest
    return Chain(block_tokens=block_tokens, blocks=tuple(blocks))


def tenant_key_id(tenant_key: bytes) -> str:
    """A public name of a tenant key, 16 hex digits: two nodes with different ones find nothing of each other's."""
    return hmac.digest(tenant_key, b"kakeya tenant key id", "sha256")[:8].hex()


def block_hash(tokens: npt.NDArray[np.int32], fingerprint: bytes, parent_hash: bytes, tenant_key: bytes) -> bytes:
    """Hash of one block (or tail) of tokens under a given parent: one link of :func:`chain_hashes`."""
    token_bytes = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return hmac.digest(tenant_key, fingerprint + parent_hash + token_bytes, "sha256")


_INNER_PAD = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD = bytes(byte ^ 0x5C for byte in range(256))


def _hmac_states(key: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """HMAC-SHA256 (RFC 2104) with the key's two blocks hashed once: copies of the inner state take a message, copies of the
    outer one its digest. For blocks that is a quarter of the time of ``hmac.digest``."""
    block = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    return hashlib.sha256(block.translate(_INNER_PAD)), hashlib.sha256(block.translate(_OUTER_PAD))
