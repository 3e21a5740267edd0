"""Storage codecs by name: what the canonical stored bytes of a part are.

A part's digest is over its stored bytes, and cache peers never decode them; the engine's side turns them into raw payloads
and back. Every codec but ``none`` makes other bytes, so it is another cache format version and thus another namespace.
STATE parts are stored raw by every codec: recurrent state feeds on itself, and an error in it would grow.
"""

from __future__ import annotations

import re
import zlib
from typing import Final, Protocol

from kakeya_zmq.codecs.geometry import RowGeometry, checked_payload
from kakeya_zmq.codecs.int8 import Int8Codec
from kakeya_zmq.codecs.lattice import LatticeCodec
from kakeya_zmq.codecs.lattice_kernel import Q_DEFAULT, LatticeBackend
from kakeya_zmq.codecs.output import claimed_bytes, output_buffer
from kakeya_zmq.compat import CACHE_FORMAT_VERSION
from wire.errors import ConfigError, DataLossError

STORAGE_CODECS: Final = ("none", "zlib", "int8", "kakeyalattice-d4")
ZLIB_LEVEL: Final = 1
ZLIB_RATIO_MAX: Final = 1032
"""Deflate never packs tighter (a match of 258 bytes takes at least two bits)."""


class StorageCodec(Protocol):
    """Turns raw payloads of FULL and WINDOW parts into stored bytes and back."""

    @property
    def name(self) -> str: ...

    @property
    def format_suffix(self) -> str:
        """What the codec appends to the cache format version; empty for ``none``."""

    @property
    def lossless(self) -> bool: ...

    def check(self, geometry: RowGeometry) -> None:
        """Raises:
        ModelError: the codec cannot take rows of this geometry.
        """

    def encode(self, raw: memoryview, geometry: RowGeometry, tokens: int) -> memoryview:
        """A part's payload as stored bytes, read-only.

        Args:
            raw: contiguous bytes, as the model's layout lays them out.
            geometry: of the part's kind.
            tokens: tokens of the part.

        Raises:
            InvalidInput: the payload has the wrong size or, for lossy codecs, holds NaN or an infinity.
        """

    def decode(self, stored: memoryview, geometry: RowGeometry, tokens: int, out: memoryview | None = None) -> memoryview:
        """The raw payload, read-only; sizes are checked before memory is allocated.

        Args:
            stored: what a peer or the store gave.
            geometry: of the part's kind.
            tokens: tokens of the part, from its description.
            out: writable bytes of exactly the payload's size to decode into; None for a new buffer. After an error its
                content is undefined.

        Raises:
            DataLossError: ``stored`` is not what :meth:`encode` makes.
            RemoteProtocolError: no part has so many tokens.
        """


class RawCodec:
    """``none``: the payload as it is; never copied unless ``out`` is given."""

    name = "none"
    format_suffix = ""
    lossless = True

    def check(self, geometry: RowGeometry) -> None:
        """Every geometry will do."""

    def encode(self, raw: memoryview, geometry: RowGeometry, tokens: int) -> memoryview:
        checked_payload(raw, geometry, tokens)
        return raw.toreadonly()

    def decode(self, stored: memoryview, geometry: RowGeometry, tokens: int, out: memoryview | None = None) -> memoryview:
        size = claimed_bytes(geometry, tokens)
        if stored.nbytes != size:
            raise DataLossError(f"a raw part of {tokens} tokens has {stored.nbytes} bytes, not {size}")
        if out is None:
            return stored.toreadonly()
        target = output_buffer(out, size)
        target[:] = stored
        return target.toreadonly()


class ZlibCodec:
    """``zlib``: one zlib stream of the payload; for systems that want it. Slower and larger than zstd on the link."""

    name = "zlib"
    format_suffix = "-zlib"
    lossless = True

    def check(self, geometry: RowGeometry) -> None:
        """Every geometry will do."""

    def encode(self, raw: memoryview, geometry: RowGeometry, tokens: int) -> memoryview:
        checked_payload(raw, geometry, tokens)
        return memoryview(zlib.compress(raw, ZLIB_LEVEL))

    def decode(self, stored: memoryview, geometry: RowGeometry, tokens: int, out: memoryview | None = None) -> memoryview:
        raw = inflate(stored, claimed_bytes(geometry, tokens))
        if out is None:
            return raw
        target = output_buffer(out, raw.nbytes)
        target[:] = raw
        return target.toreadonly()


def inflate(stored: memoryview, size: int) -> memoryview:
    """A zlib stream of exactly ``size`` bytes.

    Raises:
        DataLossError: the stream is broken, longer, shorter, or followed by something.
    """
    if stored.nbytes * ZLIB_RATIO_MAX < size:
        raise DataLossError(f"{stored.nbytes} bytes of zlib cannot hold {size}")
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(stored, size + 1)  # one more, to see whether there is more
    except zlib.error:
        raise DataLossError("a zlib stream is broken") from None
    if len(raw) != size or not stream.eof or stream.unused_data:
        raise DataLossError(f"a zlib stream does not hold exactly {size} bytes")
    return memoryview(raw)


def storage_codec(name: str, *, q_range: int = Q_DEFAULT, backend: LatticeBackend | None = None) -> StorageCodec:
    """The codec called ``name``.

    Args:
        name: one of :data:`STORAGE_CODECS`.
        q_range: Q of ``kakeyalattice-d4``.
        backend: arithmetic of ``kakeyalattice-d4``; None for NumPy.

    Raises:
        ConfigError: no codec has this name, or Q is out of range.
    """
    match name:
        case "none":
            return RawCodec()
        case "zlib":
            return ZlibCodec()
        case "int8":
            return Int8Codec()
        case "kakeyalattice-d4":
            return LatticeCodec(q_range, backend)
        case _:
            raise ConfigError(f"there is no KV codec {name!r}", remedy=f"use one of {', '.join(STORAGE_CODECS)}")


def format_version(codec: StorageCodec) -> str:
    """The cache format version of parts that ``codec`` stores."""
    return CACHE_FORMAT_VERSION + codec.format_suffix


def codec_from_format(version: str, *, backend: LatticeBackend | None = None) -> StorageCodec:
    """The codec whose :func:`format_version` is ``version``.

    Raises:
        ConfigError: there is none.
    """
    suffix = version.removeprefix(CACHE_FORMAT_VERSION)
    if version.startswith(CACHE_FORMAT_VERSION):
        for codec in (RawCodec(), ZlibCodec(), Int8Codec()):
            if suffix == codec.format_suffix:
                return codec
        lattice = re.fullmatch(r"-kl-d4-q([1-9][0-9]{0,2})", suffix, re.ASCII)
        if lattice is not None:
            return LatticeCodec(int(lattice[1]), backend)
    raise ConfigError(f"cache format version {version[:64]!r} is unknown")


def encode_part(codec: StorageCodec, raw: memoryview, geometry: RowGeometry | None, tokens: int) -> memoryview:
    """Stored bytes of a part; ``geometry`` None for a STATE part, which stays as it is. Errors as the codec's."""
    return raw.toreadonly() if geometry is None else codec.encode(raw, geometry, tokens)


def decode_part(codec: StorageCodec, stored: memoryview, geometry: RowGeometry | None, tokens: int) -> memoryview:
    """The payload of a stored part; ``geometry`` None for a STATE part. Errors as the codec's."""
    return stored.toreadonly() if geometry is None else codec.decode(stored, geometry, tokens)
