"""What a session's KV was made of: enough to make it again in a new process, bit for bit.

Theory of operation: a journal takes every command of its session and every event the child answered; what was answered is
*acknowledged*, and only that counts. The state of a session is its last import, then the tokens that were run after it, in
the very steps they were run in: prefill segments on their grid, decoded tokens one by one. :meth:`Journal.replay` names the
commands that repeat those steps. They use the same kernels on the same shapes, so the new KV has the bits of the lost one,
and whatever is sampled from it is what would have been sampled.

A command that was under way goes on where its acknowledged part ended (:meth:`Journal.resume`): a prefill with the tokens
that are left; a decode or capture from its beginning, its first events being those that are known already. They are not
handed out again, but compared: a decode that came to other tokens must fail, not go on. A decode without a seed is given
one, so that it can be repeated.

No clock, no process, no randomness of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import numpy as np

from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    Capture,
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    DecodeFinished,
    Event,
    FinishImport,
    ImportAdvanced,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    SegmentComputed,
    SessionReady,
    TokenArray,
    TokenDecoded,
)
from wire.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Tokens that one prefill ran, from one segment boundary (or its begin) to another."""

    tokens: TokenArray


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens whose KV was made one at a time."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """How a command goes on in a new process: ``command`` is run, and its first ``known_events`` are not handed out."""

    command: Command
    known_events: int


Run: TypeAlias = Prefilled | Decoded


class Journal:
    """Of one session.

    Args:
        session_id: of every command and event that is given to it.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.position = 0
        """Tokens whose KV is acknowledged."""
        self._base: tuple[Command, ...] = ()
        self._runs: list[Run] = []
        self._importing: tuple[Command, ...] = ()
        """The steps so far of an import that is not finished."""
        self._command: Command | None = None
        self._finished = False
        self._started_at = 0
        self._tokens: list[int] = []
        self._captures = 0

    # --- a command's life --------------------------------------------------------------------------------------------

    def begin(self, command: Command, fresh_seed: Callable[[], int]) -> None:
        """Take the next command.

        Args:
            fresh_seed: gives the seed of a sampled decode that names none.

        Raises:
            LocalProtocolError: another command has not ended, or it is another session's.
        """
        if self._command is not None or command.session_id != self.session_id:
            raise LocalProtocolError("a session runs one command at a time, and only its own")
        if isinstance(command, Decode) and command.sampling.seed is None and command.sampling.temperature > 0:
            command = replace(command, sampling=replace(command.sampling, seed=fresh_seed()))
        if not isinstance(command, AddParts | FinishImport):
            self._importing = ()
        self._command = command
        self._finished = False
        self._started_at = self.position
        self._tokens = []
        self._captures = 0

    @property
    def running(self) -> bool:
        """Whether a command has begun and not ended."""
        return self._command is not None

    def resume(self) -> Resume | None:
        """What to run for the command under way in a process that stands where :meth:`replay` ends.

        None: all of it is acknowledged, only its end was lost.
        """
        command = self._command
        if command is None or self._finished:
            return None
        match command:
            case Prefill(tokens=tokens):
                done = self.position - self._started_at
                return Resume(replace(command, tokens=tokens[done:]), 0)
            case Decode():
                return Resume(command, len(self._tokens))
            case Capture():
                return Resume(command, self._captures)
            case _:
                return Resume(command, 0)

    def is_known(self, index: int, event: Event) -> bool:
        """Whether ``event`` repeats the acknowledged event ``index`` of a resumed decode or capture."""
        match event:
            case TokenDecoded(token=token):
                return index < len(self._tokens) and self._tokens[index] == token
            case PartsCaptured():
                return index < self._captures
            case _:
                return False

    def acknowledge(self, event: Event) -> None:
        """Take an event of the command under way.

        Raises:
            LocalProtocolError: the command cannot have that event, or says another position than the journal knows.
        """
        command = self._command
        if command is None or self._finished or event.session_id != self.session_id:
            raise LocalProtocolError(f"{type(event).__name__} belongs to no command")
        match command, event:
            case ((OpenSession() | CloseSession()), SessionReady()):
                self._finished = True
            case ((BeginImport() | AddParts()), ImportAdvanced()):
                self._importing = (*self._importing, command)
                self._finished = True
            case ((ImportPrefix() | FinishImport()), PrefixImported(position=position)):
                self._imported(command, position)
            case Prefill(tokens=tokens), SegmentComputed(position=position):
                self._prefilled(tokens, position)
            case Decode(), TokenDecoded(token=token):
                self._tokens.append(token)
            case Decode(), DecodeFinished(position=position):
                self._decoded(position - self._started_at)
            case Capture(), PartsCaptured():
                self._captures += 1
            case _, CommandFailed(position=position):
                self._failed(command, position)
            case _:
                raise LocalProtocolError(f"{type(command).__name__} was answered with {type(event).__name__}")

    def end(self) -> int:
        """The command is over: done, failed, or left where it was. Returns the position that is acknowledged now.

        A decode that was left holds the KV of every token it handed out but the last, which nothing has run yet.
        """
        if isinstance(self._command, Decode) and not self._finished and self._tokens:
            self._decoded(len(self._tokens))
        self._command = None
        self._finished = False
        self._tokens = []
        return self.position

    # --- the session's state -----------------------------------------------------------------------------------------

    def replay(self) -> Iterator[Command]:
        """The commands that bring a session which was just opened to ``position``, and an open import to where it was."""
        yield from self._base
        for run in self._runs:
            match run:
                case Prefilled(tokens=tokens):
                    yield Prefill(self.session_id, tokens, capture=False)
                case Decoded(tokens=decoded):
                    # One at a time, as they were: a prefill of all would round differently. What it samples is unused.
                    for token in decoded:
                        yield Decode(self.session_id, token, 1, ())
                case _:
                    assert_never(run)
        yield from self._importing

    def forget(self) -> None:
        """The session is empty now: its KV cannot be trusted, or not be made again."""
        self.position = 0
        self._base = ()
        self._runs = []
        self._importing = ()
        self._tokens = []
        self._finished = True

    @property
    def kept_bytes(self) -> int:
        """Payload bytes of the parts kept for a restore; shared with the store as long as it holds them."""
        parts = (
            part
            for command in (*self._base, *self._importing)
            if isinstance(command, ImportPrefix | AddParts)
            for part in command.parts
        )
        return sum(part.payload.nbytes for part in parts)

    @property
    def replayed_tokens(self) -> int:
        """Tokens a restore has to run again."""
        return sum(len(run.tokens) for run in self._runs)

    # --- what events mean ----------------------------------------------------------------------------------------------

    def _imported(self, command: Command, position: int) -> None:
        if position != self._import_position(command):
            raise LocalProtocolError("an import ended at another position")
        self._base = (*self._importing, command) if position else ()
        self._runs = []
        self._importing = ()
        self.position = position
        self._finished = True

    def _import_position(self, command: Command) -> int:
        begun = command if isinstance(command, ImportPrefix) else next(iter(self._importing), None)
        return begun.position if isinstance(begun, ImportPrefix | BeginImport) else -1

    def _prefilled(self, tokens: TokenArray, position: int) -> None:
        done, until = self.position - self._started_at, position - self._started_at
        if not done < until <= len(tokens):
            raise LocalProtocolError("a prefill segment ended at an impossible position")
        # A copy: a slice would keep the whole prompt alive with each of its segments.
        self._runs.append(Prefilled(np.array(tokens[done:until], dtype=np.int32)))
        self.position = position
        self._finished = until == len(tokens)

    def _decoded(self, count: int) -> None:
        assert isinstance(self._command, Decode)
        run = (self._command.last_token, *self._tokens)
        # As many as were handed out, one more after an end-of-sequence token, none in a full context.
        if count not in {len(self._tokens), len(self._tokens) + 1}:
            raise LocalProtocolError("a decode ended at an impossible position")
        if count:
            self._runs.append(Decoded(run[:count]))
        self.position = self._started_at + count
        self._finished = True

    def _failed(self, command: Command, position: int) -> None:
        if position == 0 or isinstance(command, ImportPrefix):
            self.forget()
        elif position != self.position or self._tokens:
            raise LocalProtocolError("a failed command left the session at an impossible position")
        self._importing = ()
        self._finished = True
