"""``kakeya chat``: talk to the primary; text streams, and every turn says what it cost.

The conversation lives on the primary as one inference session. A turn appends only the tokens that are new, so the KV of
earlier turns is never computed again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemons.console import Console
from kakeya_zmq.client import Client, Session
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.telemetry import explanation_line
from kakeya_zmq.text import TextCodec
from wire.errors import FailureCode, InvalidInput, KakeyaError
from wire.limits import PROMPT_TOKENS_MAX
from wire.messages import PrefillProgress

HELP = "/new starts over, /why explains the last turn, /quit leaves"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to answer. ``temperature`` 0 is greedy; ``stop``: texts that end an answer."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ("\nUser:",)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer and what it cost."""

    text: str
    tokens: int
    prompt_tokens: int
    ttft_s: float
    tokens_per_second: float
    why: str


class Chat:
    """One conversation.

    Args:
        on_text: given each piece of an answer as it comes.
    """

    def __init__(self, client: Client, codec: TextCodec, options: ChatOptions, on_text: Callable[[str], None]) -> None:
        self._client = client
        self._codec = codec
        self._options = options
        self._on_text = on_text
        self._messages: list[dict[str, str]] = []
        self._seen = ""
        """The conversation as text, as far as the session's history holds it."""
        self._session: Session | None = None

    def reset(self) -> None:
        """Forget the conversation."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._messages = []
        self._seen = ""

    def say(self, text: str, on_progress: Callable[[float, float], None]) -> Turn:
        """Add the user's turn and stream the answer.

        Raises:
            KakeyaError: the primary could not answer; the conversation stays as it was before this turn.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        rendered = self._codec.apply_chat_template(messages, add_generation_prompt=True)
        session, tokens = self._new_tokens(rendered)
        started = time.perf_counter()

        def progressed(progress: PrefillProgress) -> None:
            on_progress(progress.tokens_done, progress.tokens_total)

        answer, count, first, last, stopped = self._stream(session, tokens, progressed)
        appended = session.last_appended
        assert appended is not None
        self._messages = [*messages, {"role": "assistant", "content": answer.strip()}]
        # A stopped answer is cut in the text but not in the session's history: the next turn starts a fresh session,
        # whose prompt the cache already holds up to the cut.
        self._seen = "" if stopped else rendered + answer
        if stopped:
            session.close()
            self._session = None
        return Turn(
            text=answer,
            tokens=count,
            prompt_tokens=appended.history_tokens,
            ttft_s=first - started,
            tokens_per_second=(count - 1) / (last - first) if count > 1 and last > first else 0.0,
            why=explanation_line(appended.explanation),
        )

    def _new_tokens(self, rendered: str) -> tuple[Session, list[int]]:
        if self._session is not None and self._seen and rendered.startswith(self._seen):
            return self._session, self._codec.encode(rendered[len(self._seen) :], add_bos=False)
        if self._session is not None:
            self._session.close()
        self._session = self._client.create_session(label="chat")
        return self._session, self._codec.encode(rendered)

    def _stream(
        self, session: Session, tokens: Sequence[int], progressed: Callable[[PrefillProgress], None]
    ) -> tuple[str, int, float, float, bool]:
        options = self._options
        decoder = self._codec.stream_decoder()
        text = ""
        shown = 0
        count = 0
        first = last = time.perf_counter()
        generation = session.answer(
            tokens,
            options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            on_progress=progressed,
        )
        longest = max((len(stop) for stop in options.stop), default=1)
        stopped = False
        try:
            for token in generation:
                last = time.perf_counter()
                first = last if count == 0 else first
                count += 1
                text += decoder.push(token)
                cut = min((at for stop in options.stop if (at := text.find(stop)) >= 0), default=-1)
                if cut >= 0:
                    text = text[:cut]
                    stopped = True
                    break
                # Hold back what may be the beginning of a stop text.
                safe = max(shown, len(text) - longest + 1)
                self._on_text(text[shown:safe])
                shown = safe
        finally:
            generation.close()
        if not stopped:
            text += decoder.finish()
        self._on_text(text[shown:])
        return text, count, first, last, stopped


def run_chat(
    console: Console,
    address: Address,
    psk_file: Path,
    model_folder: Path,
    options: ChatOptions,
    message: str | None,
) -> int:
    """The REPL, or one turn when ``message`` is given.

    Raises:
        KakeyaError: no primary, wrong key, bad input.
    """
    if message is not None and not message.strip():
        raise InvalidInput("there is nothing to say", remedy="give --message a text")
    if not 1 <= options.max_tokens <= PROMPT_TOKENS_MAX:
        raise InvalidInput(f"--max-tokens is {options.max_tokens}", remedy=f"from 1 to {PROMPT_TOKENS_MAX}")
    codec = TextCodec.load(model_folder)
    with Client(str(address), psk_file=psk_file) as client:
        chat = Chat(client, codec, options, console.stream)
        if message is not None:
            turn = _turn(console, chat, message)
            if console.json_mode:
                console.result({"text": turn.text, "tokens": turn.tokens, "ttft_s": round(turn.ttft_s, 4), "why": turn.why})
            return 0
        return _loop(console, chat)


def _turn(console: Console, chat: Chat, message: str) -> Turn:
    with console.progress("prefill") as show:
        ended = False

        def progressed(done: float, total: float) -> None:
            if not ended:
                show(done, total)

        turn = chat.say(message, progressed)
        ended = True
    console.stream("\n")
    console.say(
        f"[{turn.prompt_tokens} prompt tokens, first token after {turn.ttft_s:.2f} s, {turn.tokens_per_second:.1f} tok/s]"
    )
    return turn


def _loop(console: Console, chat: Chat) -> int:
    console.say(HELP)
    why = "nothing was said yet"
    while True:
        try:
            text = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            chat.reset()
            return 0
        match text:
            case "":
                continue
            case "/quit" | "/exit":
                chat.reset()
                return 0
            case "/new":
                chat.reset()
                console.say("a new conversation")
            case "/why":
                console.say(why)
            case _ if text.startswith("/"):
                console.say(f"unknown command; {HELP}")
            case _:
                try:
                    why = _turn(console, chat, text).why
                except KakeyaError as error:
                    # Whatever it was, the conversation goes on; only another fleet's key will not get better.
                    if error.code is FailureCode.UNAUTHENTICATED:
                        raise
                    console.say(f"error: {error}")
