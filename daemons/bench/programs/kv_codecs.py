"""Ours: what codecs do to the KV state of a real model: size and speed, and what the model then says.

A prompt is computed once. Its parts, packed and unpacked, build caches from which the model reads the same further tokens as
from the parts themselves; what differs between the two is what the codec did. Reading them in one pass gives the greedy
tokens too: as long as the likeliest next token is the one that was fed, a greedy decode would have gone the same way.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from daemons.bench.harness import serve
from kakeya_zmq.blocks import RawPart
from kakeya_zmq.codecs.geometry import RowGeometry, narrow
from kakeya_zmq.codecs.link import FrameDecoder, FrameEncoder
from kakeya_zmq.codecs.registry import decode_part, encode_part, storage_codec
from wire.errors import KakeyaError
from wire.limits import BLOCK_TOKENS_DEFAULT
from wire.messages import PartKind

SEGMENT_TOKENS = 256
LINK_CODECS = ("zlib", "zstd")
BARE_ZLIB = "bare zlib"
"""zlib at level 1 over payloads as they are: what one would write without a codec of ours."""
PARTS_PER_FRAME = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One part with the shapes of its rows."""

    tokens: int
    geometry: RowGeometry
    payload: memoryview


class KvCodecs:
    """The program's state: a model, the parts of some prompts, and what the model says after them."""

    def __init__(self) -> None:
        self._model: Any = None
        self._layout: Any = None
        self._samples: dict[str, list[Sample]] = {}
        self._prompts: list[tuple[RawPart, ...]] = []
        self._last: list[int] = []
        self._position = 0
        self._fed: npt.NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)

    def load(self, folder: str, threads: int) -> dict[str, object]:
        from kakeya_zmq.model.blas import prepare_blas

        report = prepare_blas(threads)
        from kakeya_zmq.model.layout import CacheLayout
        from kakeya_zmq.model.loader import load_weights
        from kakeya_zmq.model.policy import CachePolicy

        self._model = load_weights(Path(folder), report)
        self._layout = CacheLayout(self._model, block_tokens=BLOCK_TOKENS_DEFAULT, policy=CachePolicy.native())
        return {"kv_dtype": self._layout.kv_dtype}

    def prepare(self, prompt: list[int], first: bool) -> dict[str, object]:
        """Compute a prompt, but for its last token. ``first``: forget those before; others must be as long as the first."""
        if first:
            self._prompts, self._last = [], []
        self._position = len(prompt) - 1
        self._prompts.append(self._parts_of(prompt))
        self._last.append(prompt[-1])
        if first:
            wide = [sample for part in self._prompts[0] if (sample := self._sample(part)) is not None]
            self._samples = {"own": wide, "bfloat16": [_rounded(sample) for sample in wide]}
        return {"parts_bytes": sum(part.payload.nbytes for part in self._prompts[-1])}

    def refusals(self, codecs: list[tuple[str, int]]) -> dict[str, object]:
        """Why storage codecs cannot take this model's rows, keyed "name/Q"; those that can are left out."""
        found: dict[str, str] = {}
        for name, q_range in codecs:
            codec = storage_codec(name, q_range=q_range) if q_range else storage_codec(name)
            try:
                for geometry in map(self._layout.row_geometry, (PartKind.FULL, PartKind.WINDOW)):
                    if geometry is not None:
                        codec.check(geometry)
            except KakeyaError as error:
                found[f"{name}/{q_range}"] = error.message
        return {"refusals": found}

    # --- size and speed ------------------------------------------------------------------------------------------------

    def speed(self, codec: str, q_range: int, dtype: str) -> dict[str, object]:
        """Encode and decode the first prompt's parts once; ``dtype``: "own" of the model, or "bfloat16" rounded.

        Returns:
            ``encode_s``, ``decode_s``, ``raw_bytes``, ``stored_bytes``.
        """
        samples = self._samples[dtype]
        if codec == BARE_ZLIB:
            encode_s, decode_s, stored_bytes = _bare_zlib(samples)
        elif codec.startswith("link "):
            encode_s, decode_s, stored_bytes = _link(codec.removeprefix("link "), samples)
        else:
            encode_s, decode_s, stored_bytes = _storage(codec, q_range, samples)
        raw_bytes = sum(sample.payload.nbytes for sample in samples)
        return {"encode_s": encode_s, "decode_s": decode_s, "raw_bytes": raw_bytes, "stored_bytes": stored_bytes}

    # --- what the model says -------------------------------------------------------------------------------------------

    def continue_all(self, count: int) -> dict[str, object]:
        """Decode ``count`` tokens after every prompt, greedily, all prompts as one batch; they are what is fed later."""
        import mlx.core as mx

        rebuilt = [self._layout.rebuild(parts, self._position) for parts in self._prompts]
        caches = rebuilt[0]
        for index, cache in enumerate(caches):
            cache.keys = mx.concatenate([each[index].keys for each in rebuilt])
            cache.values = mx.concatenate([each[index].values for each in rebuilt])
        token = mx.array(self._last, dtype=mx.int32)
        fed = [token]
        for _ in range(count - 1):
            token = mx.argmax(self._model(token[:, None], cache=caches)[:, -1], axis=-1).astype(mx.int32)
            mx.eval(token)
            fed.append(token)
        self._fed = np.stack([np.asarray(each) for each in fed], axis=1)
        mx.clear_cache()
        return {}

    def compare(self, number: int, codecs: list[tuple[str, int]]) -> dict[str, object]:
        """Feed prompt ``number`` its continuation, from its own parts and from what each codec makes of them.

        Returns:
            For each codec, keyed "name/Q": ``kl`` (nats) and ``agrees`` of every position.
        """
        reference = self._log_probabilities(number, self._prompts[number])
        likeliest, probabilities = reference.argmax(axis=-1), np.exp(reference)
        found: dict[str, object] = {}
        for name, q_range in codecs:
            parts = tuple(self._through(part, name, q_range) for part in self._prompts[number])
            other = self._log_probabilities(number, parts)
            kl = (probabilities * (reference - other)).sum(axis=-1, dtype=np.float64)
            found[f"{name}/{q_range}"] = {
                "kl": np.maximum(kl, 0.0).tolist(),
                "agrees": (other.argmax(axis=-1) == likeliest).tolist(),
                "same_bytes": all(a.payload == b.payload for a, b in zip(parts, self._prompts[number], strict=True)),
            }
        return found

    def _parts_of(self, prompt: list[int]) -> tuple[RawPart, ...]:
        """All parts that a hit at the end of the prompt needs, captured segment by segment as an engine does."""
        import mlx.core as mx

        caches = self._layout.new_caches()
        window = self._layout.requirement.window_tokens
        parts: list[RawPart] = []
        for start in range(0, self._position, SEGMENT_TOKENS):
            stop = min(self._position, start + SEGMENT_TOKENS)
            self._model(mx.array(prompt[start:stop])[None], cache=caches)
            mx.eval([cache.state for cache in caches])
            for block in range(start, stop, BLOCK_TOKENS_DEFAULT):
                count = min(BLOCK_TOKENS_DEFAULT, stop - block)
                made = self._layout.export(caches, block, count, position=stop)
                outside = block + count <= self._position - window
                parts.extend(part for part in made if not (outside and part.kind is PartKind.WINDOW))
        mx.clear_cache()
        return tuple(parts)

    def _sample(self, part: RawPart) -> Sample | None:
        geometry = self._layout.row_geometry(part.kind)
        return None if geometry is None else Sample(part.token_count, geometry, part.payload)

    def _through(self, part: RawPart, name: str, q_range: int) -> RawPart:
        geometry = self._layout.row_geometry(part.kind)
        if name in ("link zlib", "link zstd"):
            out = memoryview(bytearray(part.payload.nbytes))
            value_bytes = 1 if geometry is None else geometry.itemsize
            frame = FrameEncoder(name.removeprefix("link ")).encode([part.payload], value_bytes)
            FrameDecoder().decode(frame, [out])
            return replace(part, payload=out.toreadonly())
        codec = storage_codec(name, q_range=q_range) if q_range else storage_codec(name)
        stored = encode_part(codec, part.payload, geometry, part.token_count)
        return replace(part, payload=decode_part(codec, stored, geometry, part.token_count))

    def _log_probabilities(self, number: int, parts: Sequence[RawPart]) -> npt.NDArray[np.float32]:
        """(tokens fed, vocabulary): of the token after each one fed."""
        import mlx.core as mx

        caches = self._layout.rebuild(parts, self._position)
        logits = self._model(mx.array(self._fed[number])[None], cache=caches)[0].astype(mx.float32)
        result = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(result)
        return np.array(result)


def _rounded(sample: Sample) -> Sample:
    """The sample as a model in bfloat16 would have it."""
    if sample.geometry.dtype == "bfloat16":
        return sample
    values = np.frombuffer(sample.payload, {"float32": np.float32, "float16": np.float16}[sample.geometry.dtype])
    out = np.empty(values.size, "<u2")
    narrow(values.astype(np.float32, copy=False), "bfloat16", out)
    return replace(sample, geometry=replace(sample.geometry, dtype="bfloat16"), payload=out.view(np.uint8).data)


def _bare_zlib(samples: Sequence[Sample]) -> tuple[float, float, int]:
    started = time.perf_counter()
    stored = [zlib.compress(sample.payload, 1) for sample in samples]
    encoded = time.perf_counter()
    for data in stored:
        zlib.decompress(data)
    return encoded - started, time.perf_counter() - encoded, sum(map(len, stored))


def _link(codec: str, samples: Sequence[Sample]) -> tuple[float, float, int]:
    encoder, decoder = FrameEncoder(codec), FrameDecoder()
    groups = [samples[at : at + PARTS_PER_FRAME] for at in range(0, len(samples), PARTS_PER_FRAME)]
    out = [[memoryview(bytearray(sample.payload.nbytes)) for sample in group] for group in groups]
    started = time.perf_counter()
    frames = [encoder.encode([sample.payload for sample in group], group[0].geometry.itemsize) for group in groups]
    encoded = time.perf_counter()
    for frame, buffers in zip(frames, out, strict=True):
        decoder.decode(frame, buffers)
    return encoded - started, time.perf_counter() - encoded, sum(frame.nbytes for frame in frames)


def _storage(name: str, q_range: int, samples: Sequence[Sample]) -> tuple[float, float, int]:
    codec = storage_codec(name, q_range=q_range) if q_range else storage_codec(name)
    out = [memoryview(bytearray(sample.payload.nbytes)) for sample in samples]
    started = time.perf_counter()
    stored = [codec.encode(sample.payload, sample.geometry, sample.tokens) for sample in samples]
    encoded = time.perf_counter()
    for data, sample, buffer in zip(stored, samples, out, strict=True):
        codec.decode(data, sample.geometry, sample.tokens, buffer)
    return encoded - started, time.perf_counter() - encoded, sum(data.nbytes for data in stored)


def main() -> None:
    program = KvCodecs()
    serve(
        {
            "load": program.load,
            "prepare": program.prepare,
            "refusals": program.refusals,
            "speed": program.speed,
            "continue_all": program.continue_all,
            "compare": program.compare,
        }
    )


if __name__ == "__main__":
    main()
