"""What link codecs do on this machine: measured once, when the first link shows up that is slow enough to ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from kakeya_zmq.codecs.link import LINK_CODECS, CodecRates, measure_codec
from kakeya_zmq.compat import CACHE_FORMAT_VERSION
from wire.messages import ValueBytes

SAMPLE_VALUES: Final = 128 * 1024
"""256 or 512 KiB: zlib, the slowest codec, does some 30 MB/s, and the whole must stay well under 100 ms."""
_BYTES_OF_TYPE: Final[Mapping[str, ValueBytes]] = {"bfloat16": 2, "float16": 2, "float32": 4}


def value_bytes_of(kv_dtype: str, cache_format_version: str) -> ValueBytes:
    """Width of the values in parts of this type and format; 1 for packed parts, mixed types and unknown ones."""
    return _BYTES_OF_TYPE.get(kv_dtype, 1) if cache_format_version == CACHE_FORMAT_VERSION else 1


class CodecProbe:
    """Call it for the rates of all link codecs; the first call measures, which takes some tens of milliseconds.

    The sample is made up: normally distributed values, each channel with a scale of its own, as KV state has them. Packed
    parts do not get smaller, so there are no rates for them, and nothing is measured.

    Args:
        kv_dtype: type of the state, e.g. "bfloat16".
        cache_format_version: how parts are stored.
    """

    def __init__(self, kv_dtype: str, cache_format_version: str) -> None:
        self._kv_dtype = kv_dtype
        self._value_bytes = value_bytes_of(kv_dtype, cache_format_version)
        self._rates: Mapping[str, CodecRates] | None = None

    def __call__(self) -> Mapping[str, CodecRates]:
        """Codec name to rates, without ``none``; empty when the parts are packed."""
        if self._rates is None:
            self._rates = self._measure() if self._value_bytes > 1 else {}
        return self._rates

    def _measure(self) -> Mapping[str, CodecRates]:
        payloads = (_sample(self._kv_dtype),)
        measure_codec("zstd", payloads, self._value_bytes)  # the first use of code and memory is no measurement
        return {name: measure_codec(name, payloads, self._value_bytes) for name in LINK_CODECS if name != "none"}


def _sample(kv_dtype: str) -> memoryview:
    generator = np.random.default_rng(1)
    channels = 256
    scales = np.exp(generator.standard_normal(channels, dtype=np.float32))
    values = generator.standard_normal((SAMPLE_VALUES // channels, channels), dtype=np.float32) * scales
    match kv_dtype:
        case "bfloat16":  # the upper half of a float32; NumPy has no such type
            return (values.view(np.uint32) >> 16).astype(np.uint16).data.cast("B")
        case "float16":
            return values.astype(np.float16).data.cast("B")
        case _:
            return values.data.cast("B")
