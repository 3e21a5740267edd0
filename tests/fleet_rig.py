"""Fleets of real daemon processes around a tiny random model, for tests: start, wait on conditions, kill, look at logs.

Nothing here imports MLX at import time; only :class:`Reference` and :func:`model_folder` do, when they are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import psutil
import pytest

from kakeya_zmq.client import Client, Session
from wire.keys import FleetKey, write_secret_file
from wire.messages import Appended, PrefillPolicy, SourceKind, Status

PROJECT: Final = Path(__file__).resolve().parents[1]
START_TIMEOUT_S: Final = 90.0
WAIT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 15.0
CONTEXT_TOKENS: Final = 32_768
VOCABULARY: Final = 512
BLOCK_TOKENS: Final = 64
"""The daemons' default."""
KEPT_PROCESSES: Final = pytest.StashKey[set[int]]()
"""Processes that belong to a fixture which outlives one test; the leak check of conftest.py leaves them alone."""

_CONFIG: Final[dict[str, Any]] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rope_theta": 10_000.0,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
}
WIDE: Final[dict[str, Any]] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256}
"""Changes that make a model whose KV is large: 2 global layers x K and V x 8 heads x 256 x 4 bytes = 32 KiB a token."""

FLAGS: Final = (
    *("--bind", "127.0.0.1:0", "--gossip-interval-s", "0.3", "--ttl-seconds", "3"),
    *("--cache-gb", "1", "--drain-s", "5"),
)
ROLE_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "primary": (
        # A worker is always taken for cheaper: here both run on the same machine, so none would ever be.
        *("--enable-prefill-cache", "--blas-threads", "1"),
        *("--primary-prefill-penalty-ms", "1e8", "--cache-lookup-timeout-s", "1"),
        *("--cache-fetch-timeout-s", "4", "--prefill-worker-timeout-s", "20"),
    ),
    "worker": ("--blas-threads", "1"),
    "cache": (),
}


# --- model ---------------------------------------------------------------------------------------------------------


def model_folder(factory: pytest.TempPathFactory, name: str = "tiny", **changes: Any) -> Path:
    """A random model in mlx-lm's folder layout, made once in a test session. The same name means the same weights."""
    folder = factory.getbasetemp() / f"model-{name}"
    if not folder.is_dir():
        building = folder.with_suffix(".building")
        building.mkdir()
        _write_model(building, {**_CONFIG, **changes})
        building.rename(folder)
    return folder


def _write_model(folder: Path, config: dict[str, Any]) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.models import gemma3_text

    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))
    key = mx.random.key(7)
    weights = []
    for path, value in tree_flatten(model.parameters()):
        key, use = mx.random.split(key)
        weights.append((path, mx.random.normal(value.shape, key=use) * 0.15))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


class Reference:
    """Cold runs of the same model in this process: what every answer must be."""

    def __init__(self, folder: Path) -> None:
        from kakeya_zmq.model.loader import load_engine

        self._engine = load_engine(folder, blas_threads=1)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        """The first ``count`` greedy tokens after ``tokens``."""
        from kakeya_zmq.engine import CloseSession, Command, CommandFailed, Decode, OpenSession, Prefill, TokenDecoded

        key = (tuple(tokens), count)
        if key not in self._known:
            found: list[int] = []
            commands: list[Command] = [OpenSession("reference")]
            commands += [Prefill("reference", np.array(tokens[:-1], dtype=np.int32), capture=False)] if tokens[1:] else []
            commands += [Decode("reference", tokens[-1], count, ()), CloseSession("reference")]
            for command in commands:
                for event in self._engine.handle(command):
                    assert not isinstance(event, CommandFailed), event
                    if isinstance(event, TokenDecoded):
                        found.append(event.token)
            self._known[key] = found
        return self._known[key]


# --- processes -----------------------------------------------------------------------------------------------------


class Node:
    """One daemon process."""

    def __init__(self, fleet: Fleet, role: str, name: str, flags: tuple[str, ...], program: tuple[str, ...]) -> None:
        self.role = role
        self.program = program
        self.name = name
        self.flags = flags
        self.address = ""
        self.log = fleet.home / "logs" / f"{name}.log"
        self.wrapper: tuple[str, ...] = ()
        """Words before the interpreter's, for example to enter a network namespace."""
        self.environment: dict[str, str] = {}
        """On top of the fleet's."""
        self._fleet = fleet
        self._ready_file = fleet.home / "run" / f"{name}.ready"
        self._bind = ""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self, peer: str = "") -> None:
        """Start it, without waiting; after the first time on the same address."""
        assert not self.running
        self._ready_file.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [*FLAGS, *ROLE_FLAGS[self.role], *self.flags, "--node-id", self.name]
        if self._bind:
            arguments += ["--bind", self._bind]
        if self.role != "cache":
            arguments += ["--model", str(self._fleet.model)]
        if peer:
            arguments += ["--peer", peer]
        with self.log.open("ab") as stream:
            command = [*self.wrapper, sys.executable, "-m", *self.program, self.role, *arguments]
            self.process = subprocess.Popen(
                [*command, "--ready-file", str(self._ready_file)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=PROJECT,
                env={**self._fleet.environment, **self.environment},
            )
        self._fleet.kept.add(self.process.pid)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.running, f"{self.name} ended while starting: {self.last_lines(3)}"
            return self._ready_file.exists()

        wait_until(ready, f"{self.name} is ready", START_TIMEOUT_S)
        self.address = self._bind = json.loads(self._ready_file.read_text(encoding="utf-8"))["address"]

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)

    def terminate(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(STOP_TIMEOUT_S)

    def restart(self) -> None:
        self.kill()
        self.launch(self._fleet.seed_for(self))
        self.wait_ready()

    def forget_address(self) -> None:
        """Let the next start take another free port."""
        self._bind = ""

    def client(self) -> Client:
        return Client(self.address, psk_file=self._fleet.psk_file)

    def status(self) -> Status:
        with self.client() as client:
            return client.status()

    def last_lines(self, count: int = 25) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-count:])


class Fleet:
    """Daemons with a home, a key and logs of their own. Leaving the block ends every process, whatever happened.

    Args:
        kept: told the pid of every process that is started here (for the leak check).
    """

    def __init__(self, model: Path, home: Path, kept: set[int] | None = None) -> None:
        self.model = model
        self.home = home
        self.kept = kept if kept is not None else set()
        self.nodes: dict[str, Node] = {}
        self.psk_file = home / "fleet.psk"
        self.environment = {**clean_environment(), "KAKEYA_HOME": str(home)}
        write_secret_file(self.psk_file, FleetKey.generate())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.show_logs()
        self.close()

    def close(self) -> None:
        running = [node for node in self.nodes.values() if node.running]
        for node in running:
            node.signal(signal.SIGCONT)
            node.signal(signal.SIGTERM)
        for node in running:
            assert node.process is not None
            try:
                node.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                node.kill()
        failed = {node.name: node.process.returncode for node in running if node.process and node.process.returncode}
        if failed:
            self.show_logs()
        assert not failed, f"did not end well when told to stop: {failed}"

    def show_logs(self) -> None:
        for node in self.nodes.values():
            print(f"--- the log of {node.name} ---\n{node.last_lines()}")

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def add(self, role: str, *flags: str, name: str = "", program: tuple[str, ...] = ("daemons",)) -> Node:
        """A node that is not started yet; ``program``: the module to run, and its first arguments."""
        node = Node(self, role, name or role, flags, program)
        self.nodes[node.name] = node
        return node

    def seed_for(self, node: Node) -> str:
        """Everybody joins through the primary, or, without one, through the first node."""
        first = self.nodes.get("primary") or next(iter(self.nodes.values()))
        return first.address if first is not node else ""

    def start(self, *roles: str, **flags: tuple[str, ...]) -> None:
        """Start the roles; the primary first, the others side by side, joined through it."""
        first, *others = [self.add(role, *flags.get(role, ())) for role in roles]
        self.launch(first)
        self.launch(*others)

    def launch(self, *nodes: Node) -> None:
        """Start nodes that were added, side by side; when this returns they are ready, and the primary knows them."""
        try:
            for node in nodes:
                node.launch(self.seed_for(node))
            for node in nodes:
                node.wait_ready()
            self.wait_joined()
        except BaseException:
            self.show_logs()
            raise

    def heal(self) -> None:
        """Continue what is stopped, restart what is dead; when this returns everybody knows everybody."""
        dead = [node for node in self.nodes.values() if not node.running]
        for node in self.nodes.values():
            if node.running:
                node.signal(signal.SIGCONT)
        self.launch(*dead)

    def wait_joined(self) -> None:
        """Wait until the primary is connected to every other running node and holds its present card."""
        primary = self.nodes.get("primary")
        if primary is None:
            return
        others = {node.name for node in self.nodes.values() if node.running and node is not primary}
        with primary.client() as client:
            wait_until(lambda: _knows(client, others), f"the primary knows {sorted(others)}")

    def wait_all_joined(self) -> None:
        """Wait until every running node is connected to every other one and holds its card."""
        running = [node for node in self.nodes.values() if node.running]
        for node in running:
            others = {other.name for other in running if other is not node}
            with node.client() as client:
                wait_until(partial(_knows, client, others), f"{node.name} knows {sorted(others)}")

    def wait_card(self, node: str, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait until what the primary knows of a node satisfies a condition."""
        with self["primary"].client() as client:

            def holds() -> bool:
                return any(condition(row) for row in client.status().peers if row["node_id"] == node)

            wait_until(holds, what)


def _knows(client: Client, names: set[str]) -> bool:
    """Whether a node is connected to these and holds their cards."""
    rows = {row["node_id"]: row for row in client.status().peers}
    return all(rows.get(name, {}).get("state") == "up" and rows[name].get("roles") for name in names)


def kept_processes(request: pytest.FixtureRequest) -> set[int]:
    """Takes the ids of processes that outlive one test, for a fixture that ends them itself."""
    return request.session.stash.setdefault(KEPT_PROCESSES, set())


@contextlib.contextmanager
def kept_fleet(request: pytest.FixtureRequest, model: Path, home: Path) -> Iterator[Fleet]:
    """A fleet for a fixture that outlives one test."""
    with Fleet(model, home, kept_processes(request)) as fleet:
        yield fleet


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of Kakeya."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KAKEYA_")}


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {timeout_s:.0f} s: {what}"
        time.sleep(0.01)


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens and how the prompt was prepared."""

    tokens: list[int]
    appended: Appended

    @property
    def reused(self) -> dict[SourceKind, int]:
        """Tokens from each source."""
        found: dict[SourceKind, int] = {}
        for source in self.appended.explanation.sources:
            if source.end == source.start:
                continue  # it only sent something that no stretch is named after
            found[source.kind] = found.get(source.kind, 0) + source.end - source.start
        return found

    @property
    def reasons(self) -> str:
        return "; ".join(self.appended.explanation.reasons)


def ask(session: Session, tokens: Sequence[int], count: int = 24, timeout_s: float = 60.0, **call: Any) -> Answer:
    """Append and generate on a session."""
    appended = session.append(tokens, timeout_s=timeout_s, **call)
    return Answer(list(session.generate(count, inter_token_timeout_s=timeout_s)), appended)


def answer(client: Client, tokens: Sequence[int], count: int = 24, **options: Any) -> Answer:
    """One prompt in a session of its own."""
    with client.create_session(**options) as session:
        return ask(session, tokens, count)


def worker_only(client: Client) -> Session:
    """A session that must be served by the fleet and does not look into the primary's own store."""
    return client.create_session(policy=PrefillPolicy.REMOTE_REQUIRED, use_local_cache=False)


def wait_published(client: Client, parts_stored: Callable[[], bool] | None = None) -> None:
    """Wait until the primary has nothing left to publish (and, if given, until a condition on the cache holds)."""
    wait_until(lambda: client.status().sections["primary"]["publish_queue"] == 0, "everything is published")
    if parts_stored is not None:
        wait_until(parts_stored, "the cache holds what was published")


def wait_idle(client: Client) -> dict[str, Any]:
    """Wait until nothing is open on a node; its ``node`` section."""

    def idle() -> bool:
        node = client.status().sections["node"]
        # The question itself is not counted: it is answered before the dispatcher sees it.
        return all(value == 0 for name, value in node.items() if name.startswith("open_"))

    wait_until(idle, "nothing is open")
    return dict(client.status().sections["node"])


def figure(client: Client, section: str, name: str) -> int:
    """One figure of a node's status; 0 when it is not there yet."""
    return int(client.status().sections.get(section, {}).get(name) or 0)


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


# --- the command -----------------------------------------------------------------------------------------------------


def run_kakeya(
    *arguments: str, home: Path, environment: dict[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "daemons", *arguments],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env={**clean_environment(), "KAKEYA_HOME": str(home), **(environment or {})},
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
        check=False,
    )
