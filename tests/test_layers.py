"""Imports go one way: every import statement of the product is checked against the rooms of the design."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("wire", "kakeya_zmq", "daemons", "dashboard")
WIRE_LIBRARIES = {"msgspec", "msgpack", "nacl", "cryptography", "zstandard"}
MODEL_LIBRARIES = {"mlx", "mlx_lm"}
FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "torch"}
MEASURED = "daemons.bench.programs"
"""References of `kakeya bench` measure the libraries themselves, each in a process of its own."""
PURE_DOMAIN = ("backoff", "blocks", "compat", "engine", "store", "coverage", "planner", "telemetry", "protocol")


def within(name: str, *packages: str) -> bool:
    """Whether the dotted ``name`` is one of ``packages`` or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported_names(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Absolute dotted names that ``source`` imports, wherever the statement stands (also through importlib)."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                if level:
                    parts = module.split(".")
                    anchor = parts[: len(parts) - level + (1 if is_package else 0)]
                    base = ".".join([*anchor, *([base] if base else [])])
                # `from a import b` may name a submodule: both are reported.
                yield base or ""
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str() as name), *_]) if ast.unparse(func) in {
                "__import__",
                "import_module",
                "importlib.import_module",
            }:
                yield name


def broken_rules(module: str, name: str) -> Iterator[str]:
    """The rules that ``module`` breaks by importing ``name``."""
    top = name.partition(".")[0]
    if top in FORBIDDEN:
        yield "this library is used nowhere"
    if within(module, "wire") and top not in {"wire", *WIRE_LIBRARIES, *sys.stdlib_module_names}:
        yield "wire imports only the standard library and byte libraries"
    if within(module, "kakeya_zmq.protocol"):
        domain = ("wire", *(f"kakeya_zmq.{part}" for part in PURE_DOMAIN))
        if top in PRODUCT and name != "kakeya_zmq" and not within(name, *domain):
            yield "protocol imports only wire and pure domain modules"
    if top == "zmq" and not within(module, "kakeya_zmq.io", MEASURED):
        yield "only kakeya_zmq.io imports zmq"
    if top in MODEL_LIBRARIES and not within(module, "kakeya_zmq.model", "kakeya_zmq.demo.prepare", MEASURED):
        yield "only kakeya_zmq.model imports mlx"
    if within(module, "kakeya_zmq.io") and within(name, "kakeya_zmq.model"):
        yield "io doesn't import model"
    if within(module, "kakeya_zmq.codecs"):
        pure = ("wire", *(f"kakeya_zmq.{part}" for part in ("blocks", "compat", "engine", "codecs")))
        if top in PRODUCT and name != "kakeya_zmq" and not within(name, *pure):
            yield "codecs are pure functions over bytes"
    if within(module, "kakeya_zmq.model") and within(name, "kakeya_zmq.io"):
        yield "model doesn't import io"
    if within(module, "kakeya_zmq.protocol") and top in {"socket", "threading", "asyncio", "multiprocessing", "selectors"}:
        yield "protocol machines own no socket and no thread"
    if within(module, "dashboard") and within(name, "kakeya_zmq.model"):
        yield "the dashboard needs no model"
    if top == "daemons" and not within(module, "daemons"):
        yield "nothing imports daemons"
    if within(module, "kakeya_zmq") and top == "dashboard":
        yield "the domain doesn't know its faces"


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One line for each broken rule of one module."""
    return [
        f"{module} imports {name}: {rule}"
        for name in imported_names(source, module, is_package=is_package)
        for rule in broken_rules(module, name)
    ]


def product_files() -> list[Path]:
    return sorted(path for room in PRODUCT for path in (ROOT / room).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_go_one_way() -> None:
    found = [
        line
        for path in product_files()
        for line in violations(path.read_text("utf-8"), module_of(path), is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_every_room_is_looked_at() -> None:
    assert {module_of(path).partition(".")[0] for path in product_files()} == set(PRODUCT)
    assert "wire.messages" in {module_of(path) for path in product_files()}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.codec", "import numpy"),
        ("wire.codec", "from kakeya_zmq.blocks import Part"),
        ("kakeya_zmq.protocol.jobs", "from kakeya_zmq.io import sockets"),
        ("kakeya_zmq.protocol.jobs", "from ..io import sockets"),
        ("kakeya_zmq.protocol.jobs", "from kakeya_zmq import config"),
        ("kakeya_zmq.protocol.jobs", "import threading"),
        ("kakeya_zmq.store", "import zmq"),
        ("daemons.primary", "def f():\n    import zmq.auth"),
        ("kakeya_zmq.text", "import mlx.core as mx"),
        ("daemons.worker", "from mlx_lm import load"),
        ("daemons.bench.ttft", "from mlx_lm import load"),
        ("daemons.bench.transfer", "import zmq"),
        ("kakeya_zmq.io.lanes", "from kakeya_zmq.model import loader"),
        ("kakeya_zmq.model.loader", "import kakeya_zmq.io.sockets"),
        ("dashboard.app", "from kakeya_zmq.model.engine import MlxEngine"),
        ("kakeya_zmq.client", "from daemons import primary"),
        ("dashboard.app", "import daemons.fleet"),
        ("kakeya_zmq.store", "import pickle"),
        ("daemons.worker", "from pickle import loads"),
        ("wire.codec", "import marshal"),
        ("kakeya_zmq.codecs.lattice", "import torch"),
        ("kakeya_zmq.codecs.link", "from kakeya_zmq.io import sockets"),
        ("kakeya_zmq.codecs.link", "from kakeya_zmq import planner"),
        ("kakeya_zmq.store", "__import__('shelve')"),
        ("kakeya_zmq.store", "import importlib\nimportlib.import_module('zmq')"),
        ("kakeya_zmq.store", "from dashboard import app"),
    ],
)
def test_the_checker_catches_a_planted_violation(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.codec", "import struct, msgspec\nfrom wire.limits import MIB\nfrom nacl import bindings"),
        (
            "kakeya_zmq.protocol.jobs",
            "from kakeya_zmq.blocks import Chain\nfrom . import effects\nfrom wire import messages",
        ),
        ("kakeya_zmq.io.lanes", "import zmq\nfrom kakeya_zmq.protocol import effects"),
        ("kakeya_zmq.io.sender", "from kakeya_zmq.codecs.link import FrameEncoder"),
        (
            "kakeya_zmq.codecs.probe",
            "import numpy\nfrom kakeya_zmq.compat import CACHE_FORMAT_VERSION\nfrom wire import limits",
        ),
        ("kakeya_zmq.client", "from kakeya_zmq.io import sockets"),
        ("kakeya_zmq.model.loader", "import mlx.core as mx\nimport mlx_lm"),
        ("kakeya_zmq.demo.prepare", "def f():\n    import mlx.core"),
        ("daemons.bench.programs.bare_zmq", "import zmq"),
        (
            "daemons.primary",
            "from daemons import node\nfrom kakeya_zmq.io import sockets\nfrom kakeya_zmq.model import loader",
        ),
    ],
)
def test_the_checker_lets_good_imports_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_are_resolved() -> None:
    assert "kakeya_zmq.io.sockets" in set(
        imported_names("from ..io import sockets", "kakeya_zmq.protocol.jobs", is_package=False)
    )
    assert "kakeya_zmq.protocol.jobs" in set(imported_names("from . import jobs", "kakeya_zmq.protocol", is_package=True))
