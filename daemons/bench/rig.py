"""What benchmarks stand on: programs, fleets with homes of their own, prompts. Closing the rig ends all of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from daemons import fleet
from daemons.bench.harness import BenchOptions, Program
from daemons.fleet import FleetPlan, Member
from kakeya_zmq.client import Client
from kakeya_zmq.demo.document import demo_document
from kakeya_zmq.user_paths import user_path
from wire.errors import FailureCode, KakeyaError, ModelError, RequestFailed
from wire.messages import Explanation, PrefillPolicy, Status

GOSSIP_SECONDS = "0.5"
"""So that a primary learns soon what a cache peer has got; the default of 10 s would be waited for, not measured."""
SETTLE_TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.02
HEAD_IDS = 10_000
"""Fewer than the vocabulary of any model with a tokenizer file has."""
MODEL_ROLES = ("primary", "worker", "cache")
MODEL_PROGRAMS = {
    "codecs": "kv_codecs",
    "fidelity": "kv_codecs",
    "remote-compute": "bare_mlx",
    "ttft": "engine_import",
    "decode": "bare_mlx",
}
"""Programs that load the model, by the benchmark that needs them."""


@dataclass(frozen=True, slots=True)
class BenchFleet:
    """Running daemons and where their keys are."""

    home: Path
    members: tuple[Member, ...]

    @property
    def psk_file(self) -> Path:
        return self.home / "fleet.psk"

    @property
    def tenant_key_file(self) -> Path:
        return self.home / "tenants" / "default.key"

    def member(self, role: str) -> Member:
        return next(member for member in self.members if member.role == role)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt through the primary. Times in seconds.

    ``append_s``: until the KV of the prompt was there; with ``at_once``, which does not tell, the time to the first token.
    """

    append_s: float
    ttft_s: float
    tokens: tuple[int, ...]
    decode_tokens_per_second: float
    explanation: Explanation


class Rig:
    """Shared by the benchmarks of one run.

    Args:
        names: benchmarks of the run.
        home: an empty folder, for the homes of fleets.
        tell: takes one line of progress.
    """

    def __init__(self, names: Sequence[str], options: BenchOptions, home: Path, tell: Callable[[str], None]) -> None:
        self.options = options
        self.tell = tell
        self.home = home
        self._stack = contextlib.ExitStack()
        self._model_fleet: BenchFleet | None = None
        self._model_programs: dict[str, Program] = {}
        self._loaded: dict[str, dict[str, Any]] = {}
        self._needed = tuple(dict.fromkeys(MODEL_PROGRAMS[name] for name in names if name in MODEL_PROGRAMS))

    def close(self) -> None:
        self._stack.close()

    # --- processes -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def program(self, name: str, *arguments: str) -> Iterator[Program]:
        """A program for the duration of a block."""
        program = Program(name, arguments)
        try:
            yield program
        finally:
            program.close()

    def model_program(self, name: str) -> Program:
        """One of the programs that load the model: started once and kept for the run."""
        self._begin_loading(name)
        if name not in self._loaded:
            try:
                self._loaded[name] = self._model_programs[name].hear()
            except BaseException:  # it has answered, and will not again: the next one who needs it starts another
                self._model_programs.pop(name).close()
                raise
        return self._model_programs[name]

    def load_ahead(self) -> None:
        """Begin to load the model into the programs of this run: while something is done whose time does not count."""
        with contextlib.suppress(KakeyaError):  # whoever needs the model will tell what is wrong with it
            for name in self._needed:
                self._begin_loading(name)

    def await_loaded(self) -> None:
        """Wait until nothing loads any more."""
        for name in [name for name in self._model_programs if name not in self._loaded]:
            with contextlib.suppress(KakeyaError):  # whoever needs it will tell
                self.model_program(name)

    def loaded(self, name: str) -> dict[str, Any]:
        """What :meth:`model_program` answered when it had loaded the model."""
        return self._loaded[name]

    def _begin_loading(self, name: str) -> None:
        if name not in self._model_programs:
            program = self._stack.enter_context(self.program(name))
            # Codecs are measured on one core.
            threads = 1 if name == "kv_codecs" else self.options.threads
            program.tell("load", folder=str(self.model_folder), threads=threads)
            self._model_programs[name] = program

    @contextlib.contextmanager
    def fleet(
        self, name: str, roles: Sequence[str], primary_flags: Sequence[str] = (), model: Path | None = None
    ) -> Iterator[BenchFleet]:
        """Daemons of these roles for the duration of a block, on free ports, with their own keys.

        Args:
            model: folder of the model they run; None: the one under test.
        """
        running = self._start_fleet(name, roles, primary_flags, model)
        try:
            yield running
        finally:
            fleet.stop_members(running.members, self.tell)

    def model_fleet(self) -> BenchFleet:
        """Primary, worker and cache peer, started once and kept for the run."""
        if self._model_fleet is None:
            self.tell("loading the model into a primary, a worker and the references")
            for name in self._needed:  # at the same time: nothing is measured while models load
                self._begin_loading(name)
            running = self._stack.enter_context(self.fleet("model", MODEL_ROLES))
            self.await_peers(running)
            for name in self._needed:
                self.model_program(name)
            self._model_fleet = running
        return self._model_fleet

    def _start_fleet(
        self, name: str, roles: Sequence[str], primary_flags: Sequence[str], model: Path | None = None
    ) -> BenchFleet:
        home = self.home / name
        threads = str(self.options.threads)
        extra: list[tuple[str, tuple[str, ...]]] = [(role, ("--gossip-interval-s", GOSSIP_SECONDS)) for role in roles]
        extra += [(role, ("--blas-threads", threads)) for role in roles if role != "cache"]
        extra.append(("primary", tuple(primary_flags)))
        plan = FleetPlan(
            ephemeral=True,
            model=str(model or self.model_folder) if set(roles) - {"cache"} else "",
            roles=tuple(roles),
            extra=tuple(extra),
        )
        before = os.environ["KAKEYA_HOME"]
        os.environ["KAKEYA_HOME"] = str(home)
        try:
            fleet.ensure_psk(fleet.default_psk_file())
            return BenchFleet(home, fleet.start_fleet(plan, self.tell))
        finally:
            os.environ["KAKEYA_HOME"] = before

    def await_peers(self, running: BenchFleet) -> None:
        """Wait until the primary is connected to the others and knows what they are."""
        others = {member.node_id for member in running.members if member.role != "primary"}

        def complete(status: Status) -> bool:
            return others <= {str(row["node_id"]) for row in status.peers if row.get("state") == "up" and row.get("roles")}

        with self.client(running) as client:
            wait_for("the primary to find its peers", lambda: complete(client.status()))

    # --- prompts ----------------------------------------------------------------------------------------------------

    @cached_property
    def model_folder(self) -> Path:
        """The model under test.

        Raises:
            ModelError: the demo model cannot be prepared.
        """
        if self.options.model:
            folder = user_path(self.options.model, "--model").resolve()
            if not (folder / "config.json").is_file():
                raise ModelError(f"{folder} is no folder of an MLX model", remedy="give --model a folder with a config.json")
            return folder
        from kakeya_zmq.demo.prepare import prepare_demo_model

        return prepare_demo_model(on_progress=lambda step, share: None)

    @cached_property
    def _text(self) -> tuple[list[int], int]:
        """Tokens to make prompts of, and how many different token ids there may be in front of them."""
        if (self.model_folder / "tokenizer.json").is_file():
            from kakeya_zmq.text import TextCodec

            return TextCodec.load(self.model_folder).encode(demo_document(), add_bos=False), HEAD_IDS
        # A model without a tokenizer can be measured as well; what it is told need not mean anything.
        config = json.loads((self.model_folder / "config.json").read_text(encoding="utf-8"))
        vocabulary = int(config["vocab_size"])
        return random.Random(1).choices(range(2, vocabulary), k=4096), vocabulary

    def prompt(self, count: int, salt: int) -> list[int]:
        """``count`` tokens of real text; prompts of different salts differ from their first tokens on."""
        text, head_ids = self._text
        head = random.Random(salt).choices(range(2, head_ids), k=4)
        start = (salt * 997) % len(text)
        return (head + text[start:] + text * (count // len(text) + 1))[:count]

    def client(self, running: BenchFleet) -> Client:
        return Client(running.member("primary").address, psk_file=running.psk_file)


def answer(
    client: Client,
    tokens: Sequence[int],
    *,
    policy: PrefillPolicy,
    publish: bool = False,
    exclude: Sequence[str] = (),
    max_tokens: int = 1,
    at_once: bool = False,
) -> Answer:
    """Send one prompt to the primary, in a session of its own that neither looks into nor fills the primary's store.

    Args:
        at_once: ask for the answer together with the prompt, as an application does that wants nothing between.
    """
    with client.create_session(policy=policy, use_local_cache=False, publish=publish, exclude_nodes=exclude) as session:
        started = time.perf_counter()
        appended = None if at_once else session.append(tokens)
        appended_at = first = last = time.perf_counter()
        answered: list[int] = []
        for token in session.answer(tokens, max_tokens) if at_once else session.generate(max_tokens):
            last = time.perf_counter()
            if not answered:
                first = last
            answered.append(token)
        appended = appended or session.last_appended
    assert appended is not None
    return Answer(
        append_s=(first if at_once else appended_at) - started,
        ttft_s=first - started,
        tokens=tuple(answered),
        decode_tokens_per_second=(len(answered) - 1) / (last - first) if len(answered) > 1 else 0.0,
        explanation=appended.explanation,
    )


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Poll until ``condition`` holds.

    Raises:
        RequestFailed: DEADLINE_EXCEEDED.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, f"waited {SETTLE_TIMEOUT_SECONDS:.0f} s for {what}")
        time.sleep(POLL_SECONDS)


def succeeds(attempt: Callable[[], object]) -> bool:
    """Whether ``attempt`` ends without a failure of the fleet: for conditions that can only be tried."""
    try:
        attempt()
    except KakeyaError:  # not yet; the caller has a deadline
        return False
    return True
