"""Digests that say which model this is: weights, tokenizer, RoPE settings; imports no model library.

Two nodes may share KV only if these are equal, so they are taken from contents, never from names or dates. Hashing the
weights of a large model takes minutes: digests of files are remembered in a small cache file, keyed by everything the
file system says about a file (where, size, inode, time of last write and of last status change).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wire.errors import ModelError
from wire.files import make_private_folder, read_regular, write_private_file
from wire.limits import MIB

Progress = Callable[[str], None]

READ_BYTES = 8 * MIB
"""One read while hashing: large enough that SHA-256, not the call, is the cost."""
PROGRESS_STEP_BYTES = 512 * MIB
HEADER_BYTES_MAX = 100 * MIB
"""The safetensors format's own limit for its header."""
DIGEST_CACHE_BYTES_MAX = 1 * MIB
DIGEST_CACHE_ENTRIES_MAX = 4096

IGNORED_CONFIG_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Say where a model came from, not what it computes."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
ROPE_KEYS = frozenset({"max_position_embeddings", "original_max_position_embeddings"})
"""Besides every key that contains "rope" or "rotary": what RoPE scaling is computed from."""


class DigestCache:
    """File digests remembered between runs, as JSON; damage to it only costs hashing again.

    Args:
        path: where it is kept (mode 0600, replaced atomically), or None to remember nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._digests: dict[str, str] = {}
        if path is not None:
            self._digests = _read_digests(path)

    def get(self, file: Path, status: os.stat_result) -> str | None:
        return self._digests.get(_cache_key(file, status))

    def put(self, file: Path, status: os.stat_result, digest: str) -> None:
        """Remember, and write the cache file. A cache file that can't be written is not an error."""
        self._digests[_cache_key(file, status)] = digest
        while len(self._digests) > DIGEST_CACHE_ENTRIES_MAX:
            del self._digests[next(iter(self._digests))]
        if self._path is not None:
            # The cache only saves time; a full or read-only disk must not keep a model from loading.
            with contextlib.suppress(OSError):
                _write_atomically(self._path, json.dumps(self._digests, separators=(",", ":")))


def file_sha256(file: Path, cache: DigestCache, on_progress: Progress | None = None) -> str:
    """SHA-256 of a file, hexadecimal, from the cache if the file is unchanged.

    Raises:
        ModelError: the file can't be read, or changed while it was read.
    """
    try:
        before = file.stat()
        known = cache.get(file, before)
        if known is not None:
            return known
        digest = _hash_contents(file, before.st_size, on_progress)
        after = file.stat()
    except OSError as error:
        raise ModelError(f"cannot read {file.name}: {error.strerror or 'input/output error'}") from error
    if _cache_key(file, before) != _cache_key(file, after):
        raise ModelError(f"{file.name} changed while it was read", remedy="wait until the download is complete")
    cache.put(file, after, digest)
    return digest


def model_revision(
    config: Mapping[str, Any], files: Sequence[Path], cache: DigestCache, on_progress: Progress | None = None
) -> str:
    """SHA-256, hexadecimal, over the configuration and the names and contents of the weight files.

    Raises:
        ModelError: see :func:`file_sha256`.
    """
    relevant = {key: value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}
    digests = [[file.name, file_sha256(file, cache, on_progress)] for file in sorted(files)]
    return _hash_json({"config": relevant, "weights": digests})


def parameters_revision(config: Mapping[str, Any], parameters: Iterable[tuple[str, str, Sequence[int], memoryview]]) -> str:
    """The same for a model that lives only in memory.

    Args:
        config: JSON-like.
        parameters: (name, dtype name, shape, contents as bytes) of each.
    """
    digests = sorted(
        [name, dtype, list(shape), hashlib.sha256(contents).hexdigest()] for name, dtype, shape, contents in parameters
    )
    return _hash_json({"config": dict(config), "parameters": digests})


def tokenizer_revision(folder: Path) -> str:
    """SHA-256, hexadecimal, over the names and contents of the tokenizer files and chat template that are there.

    Raises:
        ModelError: a file can't be read.
    """
    nothing_remembered = DigestCache(None)
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return _hash_json([[file.name, file_sha256(file, nothing_remembered)] for file in present])


def rope_hash(config: Mapping[str, Any]) -> str:
    """SHA-256, hexadecimal, of the rotary-embedding settings, with the path of each (they may be in ``text_config``)."""
    found: dict[str, Any] = {}

    def collect(prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            path = f"{prefix}{key}"
            if "rope" in key or "rotary" in key or key in ROPE_KEYS:
                found[path] = value
            elif isinstance(value, Mapping):
                collect(f"{path}.", value)

    collect("", config)
    return _hash_json(found)


def quantization_name(config: Mapping[str, Any]) -> str:
    """ "none", or like "4bit-group64", "mxfp4-4bit-group32", "4bit-group64-mixed-1f2e3d4c" (some layers differ)."""
    settings = config.get("quantization") or config.get("quantization_config")
    if not isinstance(settings, Mapping) or not settings:
        return "none"
    bits = settings.get("bits")
    group = settings.get("group_size")
    if not isinstance(bits, int) or not isinstance(group, int):
        # A scheme of another tool (AWQ, GPTQ, compressed-tensors): its name and a digest of its settings.
        return f"{settings.get('quant_method', 'other')}-{_hash_json(settings)[:8]}"
    mode = settings.get("mode", "affine")
    name = f"{bits}bit-group{group}" if mode == "affine" else f"{mode}-{bits}bit-group{group}"
    layers = {key: value for key, value in settings.items() if isinstance(value, Mapping | bool)}
    return f"{name}-mixed-{_hash_json(layers)[:8]}" if layers else name


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files that mlx-lm loads, each checked to be complete.

    Raises:
        ModelError: none there, one of the index missing, or one truncated.
    """
    files = tuple(sorted(folder.glob("model*.safetensors")))
    if not files:
        raise ModelError(
            f"no model*.safetensors in {folder}", remedy="convert the model with mlx_lm.convert, or finish its download"
        )
    names = {file.name for file in files}
    missing = sorted(_indexed_names(folder) - names)
    if missing:
        raise ModelError(f"{len(missing)} weight files are missing, first {missing[0]}", remedy="finish the download")
    for file in files:
        _check_complete(file)
    return files


def _indexed_names(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    try:
        return {str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index.name} is not a weight index", remedy="download it again") from error


def _check_complete(file: Path) -> None:
    """Hold a safetensors file's size against its header (8-byte little-endian length, then JSON with data offsets)."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_bytes > min(HEADER_BYTES_MAX, size - 8):
                raise ModelError(f"{file.name} is truncated or not a safetensors file", remedy="download it again")
            header = json.loads(stream.read(header_bytes))
        data_bytes = max(
            (int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0
        )
    except OSError as error:
        raise ModelError(f"cannot read {file.name}: {error.strerror or 'input/output error'}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"{file.name} has a broken header", remedy="download it again") from error
    expected = 8 + header_bytes + data_bytes
    if size < expected:
        raise ModelError(f"{file.name} is truncated: {size:,} of {expected:,} bytes", remedy="download it again")


def _hash_contents(file: Path, size: int, on_progress: Progress | None) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    done = 0
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            if on_progress and done // PROGRESS_STEP_BYTES != (done + count) // PROGRESS_STEP_BYTES:
                on_progress(f"hashing {file.name}: {100 * (done + count) // max(size, 1)} %")
            done += count
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """SHA-256, hexadecimal, of a text as UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _hash_json(value: Any) -> str:
    return text_sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str))


def _cache_key(file: Path, status: os.stat_result) -> str:
    # The path is hashed so that the cache file does not tell where models are kept.
    place = hashlib.sha256(str(file.resolve()).encode("utf-8")).hexdigest()[:32]
    return f"{place}:{status.st_size}:{status.st_ino}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _read_digests(path: Path) -> dict[str, str]:
    try:
        entries = json.loads(read_regular(path, DIGEST_CACHE_BYTES_MAX))
    except (OSError, ValueError):  # absent, unreadable or damaged: hash again
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if isinstance(value, str) and len(value) == 64}


def _write_atomically(path: Path, text: str) -> None:
    make_private_folder(path.parent)
    write_private_file(path, text.encode("utf-8"))
