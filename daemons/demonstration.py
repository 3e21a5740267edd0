"""``kakeya demo``: one long prompt, answered four ways by a real fleet, with the times side by side.

cold          the primary computes the prompt itself
worker        a prefill worker computes it and streams its KV to the primary
remote hit    the primary has been restarted; a cache peer holds the KV
hot           the primary still holds the KV itself

The prompt starts with a fresh nonce, so that every run is honest: nothing of it can be cached before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from daemons import fleet
from daemons.console import Console
from kakeya_zmq.client import Client, Session
from kakeya_zmq.demo.document import demo_prompt
from kakeya_zmq.text import TextCodec
from wire.errors import FailureCode, RequestFailed
from wire.messages import Explanation, PrefillPolicy, PrefillProgress, SourceKind, Status

OUTPUT_TOKENS = 32
SETTLE_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """What one way of answering cost. Times in seconds."""

    name: str
    ttft_s: float
    decode_tokens_per_second: float
    tokens: tuple[int, ...]
    text: str
    reused_tokens: int
    transfer_bytes: int
    sources: tuple[SourceKind, ...]
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole demonstration."""

    prompt_tokens: int
    cold: Way
    worker: Way
    remote_hit: Way
    hot: Way

    @property
    def ways(self) -> tuple[Way, ...]:
        return (self.cold, self.worker, self.remote_hit, self.hot)

    @property
    def tokens_equal(self) -> bool:
        return all(way.tokens == self.cold.tokens for way in self.ways)

    @property
    def ok(self) -> bool:
        """Equal tokens, and each way really took the way it is named after."""
        return (
            self.tokens_equal
            and set(self.cold.sources) == {SourceKind.COMPUTED}
            and set(self.worker.sources) == {SourceKind.WORKER}
            and set(self.remote_hit.sources) == {SourceKind.REMOTE_CACHE}
            and set(self.hot.sources) == {SourceKind.HOT}
        )

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "tokens_equal": self.tokens_equal,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": len(self.cold.tokens),
            "cold_ttft_s": round(self.cold.ttft_s, 4),
            "worker_ttft_s": round(self.worker.ttft_s, 4),
            "remote_hit_ttft_s": round(self.remote_hit.ttft_s, 4),
            "hot_ttft_s": round(self.hot.ttft_s, 4),
            "worker_bytes": self.worker.transfer_bytes,
            "remote_hit_bytes": self.remote_hit.transfer_bytes,
            "decode_tok_s": round(self.cold.decode_tokens_per_second, 2),
        }


class Demonstration:
    """Runs the four ways against a running local fleet.

    Args:
        psk_file: the fleet's key.
        model_folder: for the tokenizer.
    """

    def __init__(self, console: Console, psk_file: Path, model_folder: Path) -> None:
        self._console = console
        self._psk_file = psk_file
        self._codec = TextCodec.load(model_folder)
        self._prompt = self._codec.encode(f"Copy {secrets.token_hex(6)}.\n\n{demo_prompt()}")

    def run(self) -> Outcome:
        """All four ways.

        Raises:
            KakeyaError: the fleet is not complete, or one way failed; the line says which.
        """
        worker_id, cache_id = self._member_id("worker"), self._member_id("cache")
        self._await_peers({worker_id, cache_id})
        self._console.say(f"prompt: {len(self._prompt)} tokens, answer: {OUTPUT_TOKENS} tokens, greedy")
        cold = self._way(
            "cold",
            "cold: the primary computes the prompt",
            policy=PrefillPolicy.LOCAL_ONLY,
            use_local_cache=False,
            publish=False,
        )
        worker = self._way(
            "worker", "worker: another process computes it", policy=PrefillPolicy.REMOTE_REQUIRED, exclude_nodes=(cache_id,)
        )
        self._await_published()
        self._console.say("restarting the primary: its memory is empty now, the cache peer holds the KV")
        member = fleet.find_member("primary")
        assert member is not None
        fleet.restart_member(member, self._console.say)
        self._await_peers({worker_id, cache_id})
        remote = self._way(
            "remote hit",
            "remote hit: the KV comes from the cache peer",
            policy=PrefillPolicy.REMOTE_REQUIRED,
            exclude_nodes=(worker_id,),
        )
        hot = self._way("hot", "hot: the primary still holds the KV", policy=PrefillPolicy.LOCAL_FALLBACK)
        return Outcome(len(self._prompt), cold, worker, remote, hot)

    def _way(
        self,
        name: str,
        title: str,
        *,
        policy: PrefillPolicy,
        use_local_cache: bool = True,
        publish: bool = True,
        exclude_nodes: tuple[str, ...] = (),
    ) -> Way:
        with (
            self._client("primary") as client,
            client.create_session(
                label=f"demo {name}",
                policy=policy,
                use_local_cache=use_local_cache,
                publish=publish,
                exclude_nodes=exclude_nodes,
            ) as session,
        ):
            return self._measure(name, title, session)

    def _measure(self, name: str, title: str, session: Session) -> Way:
        console = self._console
        console.say("")
        console.say(title)
        started = time.perf_counter()
        with console.progress("prefill") as show:

            def progressed(progress: PrefillProgress) -> None:
                show(progress.tokens_done, progress.tokens_total)

            appended = session.append(self._prompt, on_progress=progressed)
        tokens: list[int] = []
        decoder = self._codec.stream_decoder()
        first = last = started
        text = ""
        for token in session.generate(OUTPUT_TOKENS):
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(token)
            piece = decoder.push(token)
            text += piece
            console.stream(piece)
        piece = decoder.finish()
        console.stream(piece + "\n")
        explanation = appended.explanation
        reused = sum(s.end - s.start for s in explanation.sources if s.kind is not SourceKind.COMPUTED)
        return Way(
            name=name,
            ttft_s=first - started,
            decode_tokens_per_second=(len(tokens) - 1) / (last - first) if len(tokens) > 1 else 0.0,
            tokens=tuple(tokens),
            text=text + piece,
            reused_tokens=reused,
            transfer_bytes=sum(source.transfer_bytes for source in explanation.sources),
            sources=tuple(source.kind for source in explanation.sources),
            explanation=explanation,
        )

    # --- waiting for the fleet -----------------------------------------------------------------------------------------

    def _client(self, role: str) -> Client:
        member = fleet.find_member(role)
        if member is None:
            raise RequestFailed(
                FailureCode.UNAVAILABLE, f"the {role} is not running", remedy="see its log, then `kakeya up`"
            )
        return Client(member.address, psk_file=self._psk_file)

    def _member_id(self, role: str) -> str:
        member = fleet.find_member(role)
        if member is None:
            raise RequestFailed(FailureCode.UNAVAILABLE, f"the {role} is not running", remedy="run `kakeya up`")
        return member.node_id

    def _await_peers(self, node_ids: set[str]) -> None:
        def complete(status: Status) -> bool:
            return node_ids <= {str(row["node_id"]) for row in status.peers if row.get("state") == "up" and row.get("roles")}

        self._await("the primary to find the worker and the cache peer", complete)

    def _await_published(self) -> None:
        def published(status: Status) -> bool:
            figures = status.sections["prefill"]
            return int(figures.get("publish_successes") or 0) > 0 and status.sections["primary"].get("publish_queue") == 0

        self._await("the cache peer to take its copy", published)

    def _await(self, what: str, condition: Callable[[Status], bool]) -> None:
        deadline = time.monotonic() + SETTLE_TIMEOUT_SECONDS
        with self._client("primary") as client:
            while not condition(client.status()):
                if time.monotonic() > deadline:
                    raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, f"waited {SETTLE_TIMEOUT_SECONDS:.0f} s for {what}")
                time.sleep(0.05)


def show_outcome(console: Console, outcome: Outcome) -> None:
    """The table, and what it means."""
    rows = [
        (
            way.name,
            f"{way.ttft_s:.3f}",
            f"{outcome.cold.ttft_s / way.ttft_s:.1f}×",
            f"{way.reused_tokens}",
            f"{way.transfer_bytes / 1e6:.1f}",
            f"{way.decode_tokens_per_second:.1f}",
        )
        for way in outcome.ways
    ]
    heads = ("way", "TTFT s", "vs cold", "tokens reused", "MB moved", "decode tok/s")
    console.table(f"one prompt of {outcome.prompt_tokens} tokens, answered four ways", heads, rows)
    if outcome.tokens_equal:
        console.say("all four answers are the same tokens")
    else:
        console.say("THE ANSWERS DIFFER: this must not happen; please report it")
    for way in outcome.ways:
        for reason in way.explanation.reasons:
            console.say(f"{way.name}: {reason}")


def demonstrate(console: Console, psk_file: Path, model_folder: Path) -> Outcome:
    """Run and show it; the fleet must be up.

    Raises:
        KakeyaError: one line says what failed.
    """
    outcome = Demonstration(console, psk_file, model_folder).run()
    show_outcome(console, outcome)
    if not outcome.ok and outcome.tokens_equal:
        console.say("one of the ways did not take the way it should have; the reasons are above")
    return outcome
