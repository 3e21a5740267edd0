"""How much smaller and how fast: every storage and link codec on the KV state of the real demo model.

Run: ``python -m tests.bench.bench_codecs [--tokens 512] [--rounds 5] [--json]``. Not collected by pytest.

One core: BLAS is held to one thread, and the clock is processor time, which holds on a busy machine too. Every round runs
every codec once, in turn; the table has the medians. Rates are megabytes (10**6) of the payload a second in its own
type. The heap is tuned as the daemons do it. float32 is what the demo model computes; bfloat16 is the same
state rounded, as larger models have it. The bars, on bfloat16 but for the rates of D4:

    zstd at least 1.40x smaller, and to compress at least 8x as fast as zlib level 1 on the bare payload
    D4 Q = 38 at least 2.45x smaller, at least 150 MB/s of float32 to encode and 300 MB/s to decode
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kakeya_zmq.codecs.geometry import RowGeometry, narrow, widen
from kakeya_zmq.codecs.link import FrameDecoder, FrameEncoder
from kakeya_zmq.codecs.registry import StorageCodec, inflate, storage_codec
from kakeya_zmq.io.memory import tune_heap
from wire.messages import PartKind

ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "VECLIB_MAXIMUM_THREADS": "1"}
STORAGE: Final = (("int8", 0), ("kakeyalattice-d4", 38), ("kakeyalattice-d4", 44), ("kakeyalattice-d4", 152))
ZSTD_RATIO, ZSTD_SPEED = 1.40, 8.0
LATTICE_RATIO, LATTICE_ENCODE, LATTICE_DECODE = 2.45, 150.0, 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One part of real KV state."""

    kind: PartKind
    tokens: int
    geometry: RowGeometry
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one type. ``relative_error`` is the mean squared error by the mean square: of K and of V."""

    name: str
    dtype: str
    ratio: float
    encode_megabytes_per_second: float
    decode_megabytes_per_second: float
    relative_error: tuple[float, float]


def real_parts(model_folder: Path, tokens: int) -> list[Sample]:
    """The float32 parts of the demo prompt's first tokens."""
    from kakeya_zmq.demo.document import demo_prompt
    from kakeya_zmq.engine import OpenSession, Prefill, SegmentComputed
    from kakeya_zmq.model.layout import CacheLayout
    from kakeya_zmq.model.loader import load_engine
    from kakeya_zmq.model.policy import CachePolicy
    from kakeya_zmq.text import TextCodec

    engine = load_engine(model_folder, blas_threads=1)
    layout = CacheLayout(engine._model, block_tokens=64, policy=CachePolicy.native())
    prompt = np.array(TextCodec.load(model_folder).encode(demo_prompt())[:tokens], np.int32)
    list(engine.handle(OpenSession("bench")))
    samples = []
    for event in engine.handle(Prefill("bench", prompt)):
        assert isinstance(event, SegmentComputed), event
        for part in event.parts:
            geometry = layout.row_geometry(part.kind)
            assert geometry is not None
            samples.append(Sample(part.kind, part.token_count, geometry, part.payload))
    engine.close()
    return samples


def as_type(sample: Sample, dtype: str) -> Sample:
    """The sample rounded to ``dtype``."""
    geometry = replace(sample.geometry, dtype=dtype)
    values = np.frombuffer(sample.payload, np.float32)
    out = np.empty(values.size, f"<u{geometry.itemsize}" if dtype == "bfloat16" else f"<f{geometry.itemsize}")
    narrow(values, dtype, out)
    return replace(sample, geometry=geometry, payload=out.view(np.uint8).data.toreadonly())


class Runner:
    """One codec over one set of samples, once a round."""

    def __init__(self, name: str, samples: Sequence[Sample]) -> None:
        self.name = name
        self.samples = samples
        self.encode_s: list[float] = []
        self.decode_s: list[float] = []
        self.stored_bytes = 0
        self.out = [np.empty(sample.payload.nbytes, np.uint8) for sample in samples]

    def round(self) -> None:
        started = time.process_time()
        stored = self.encode()
        encoded = time.process_time()
        self.decode(stored)
        self.decode_s.append(time.process_time() - encoded)
        self.encode_s.append(encoded - started)
        self.stored_bytes = sum(each.nbytes for each in stored)

    def encode(self) -> list[memoryview]:
        raise NotImplementedError

    def decode(self, stored: list[memoryview]) -> None:
        raise NotImplementedError

    def result(self) -> Row:
        total = sum(sample.payload.nbytes for sample in self.samples)
        return Row(
            name=self.name,
            dtype=self.samples[0].geometry.dtype,
            ratio=total / self.stored_bytes,
            encode_megabytes_per_second=total / 1e6 / statistics.median(self.encode_s),
            decode_megabytes_per_second=total / 1e6 / statistics.median(self.decode_s),
            relative_error=self._errors(),
        )

    def _errors(self) -> tuple[float, float]:
        """Of K and of V: tensors alternate in a payload."""
        squares, errors = [0.0, 0.0], [0.0, 0.0]
        for sample, out in zip(self.samples, self.out, strict=True):
            original, decoded = (self._tensors(sample, data) for data in (sample.payload, out.data))
            for index, (before, after) in enumerate(zip(original, decoded, strict=True)):
                squares[index % 2] += float((before**2).sum())
                errors[index % 2] += float(((before - after) ** 2).sum())
        return errors[0] / squares[0], errors[1] / squares[1]

    @staticmethod
    def _tensors(sample: Sample, data: memoryview) -> list[np.ndarray[Any, Any]]:
        code = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[sample.geometry.dtype]
        values = widen(np.frombuffer(data, code), sample.geometry.dtype).astype(np.float64)
        ends = np.cumsum([heads * dim * sample.tokens for heads, dim in sample.geometry.tensors])
        return np.split(values, ends[:-1])


class StorageRunner(Runner):
    def __init__(self, codec: StorageCodec, name: str, samples: Sequence[Sample]) -> None:
        super().__init__(name, samples)
        self.codec = codec

    def encode(self) -> list[memoryview]:
        return [self.codec.encode(each.payload, each.geometry, each.tokens) for each in self.samples]

    def decode(self, stored: list[memoryview]) -> None:
        for sample, data, out in zip(self.samples, stored, self.out, strict=True):
            self.codec.decode(data, sample.geometry, sample.tokens, out.data)


class LinkRunner(Runner):
    """Everything in one frame, as a sender makes of many small parts."""

    def __init__(self, codec: str, samples: Sequence[Sample]) -> None:
        super().__init__(f"link {codec}", samples)
        self.encoder, self.decoder = FrameEncoder(codec), FrameDecoder()

    def encode(self) -> list[memoryview]:
        return [self.encoder.encode([each.payload for each in self.samples], self.samples[0].geometry.itemsize)]

    def decode(self, stored: list[memoryview]) -> None:
        self.decoder.decode(stored[0], [out.data for out in self.out])


class BareZlibRunner(Runner):
    """The reference: what one would do without thinking."""

    def encode(self) -> list[memoryview]:
        return [memoryview(zlib.compress(each.payload, 1)) for each in self.samples]

    def decode(self, stored: list[memoryview]) -> None:
        for data, out in zip(stored, self.out, strict=True):
            out[:] = np.frombuffer(inflate(data, out.nbytes), np.uint8)


def runners(samples: Sequence[Sample]) -> list[Runner]:
    lossy: list[Runner] = []
    for name, q_range in STORAGE:
        codec = storage_codec(name, q_range=q_range) if q_range else storage_codec(name)
        lossy.append(StorageRunner(codec, f"{name} Q={q_range}" if q_range else name, samples))
    return [BareZlibRunner("zlib-1, bare", samples), LinkRunner("zlib", samples), LinkRunner("zstd", samples), *lossy]


def bars(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """(what, measured, at least)"""
    by_key = {(row.name, row.dtype): row for row in rows}
    zstd, bare = by_key["link zstd", "bfloat16"], by_key["zlib-1, bare", "bfloat16"]
    lattice, wide = by_key["kakeyalattice-d4 Q=38", "bfloat16"], by_key["kakeyalattice-d4 Q=38", "float32"]
    return [
        ("zstd ratio, bfloat16", zstd.ratio, ZSTD_RATIO),
        (
            "zstd encode speed / zlib-1",
            zstd.encode_megabytes_per_second / bare.encode_megabytes_per_second,
            ZSTD_SPEED,
        ),
        ("D4 Q=38 ratio, bfloat16", lattice.ratio, LATTICE_RATIO),
        ("D4 Q=38 encode MB/s of float32", wide.encode_megabytes_per_second, LATTICE_ENCODE),
        ("D4 Q=38 decode MB/s of float32", wide.decode_megabytes_per_second, LATTICE_DECODE),
    ]


def print_table(rows: Sequence[Row], write: Callable[[str], None]) -> None:
    write(f"{'codec':24} {'type':9} {'ratio':>6} {'encode':>8} {'decode':>8}  {'rel MSE K':>9} {'rel MSE V':>9}")
    for row in rows:
        errors = " ".join(f"{error:9.1e}" if error else f"{'exact':>9}" for error in row.relative_error)
        rates = f"{row.encode_megabytes_per_second:8.0f} {row.decode_megabytes_per_second:8.0f}"
        write(f"{row.name:24} {row.dtype:9} {row.ratio:5.2f}x {rates}  {errors}")
    for what, measured, least in bars(rows):
        write(f"{'holds' if measured >= least else 'FAILS'}: {what}: {measured:.2f}, bar {least:g}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(arguments)
    from kakeya_zmq.demo.prepare import prepare_demo_model

    tune_heap()
    folder = prepare_demo_model(on_progress=lambda step, share: None)
    wide = real_parts(folder, options.tokens)
    everything = [*runners([as_type(each, "bfloat16") for each in wide]), *runners(wide)]
    for _ in range(options.rounds):
        for runner in everything:
            runner.round()
    rows = [runner.result() for runner in everything]
    print_table(rows, print)
    checked = bars(rows)
    if options.json:
        results = [{field: getattr(row, field) for field in Row.__slots__} for row in rows]
        print(json.dumps({"bench": "codecs", "rows": results, "bars": checked}))
    return 0 if all(measured >= least for _, measured, least in checked) else 1


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):  # read when NumPy is loaded
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], {**os.environ, **ONE_THREAD})
    sys.exit(main())
