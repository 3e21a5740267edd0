"""``dedupe``: prompts that share most of their tokens take the space of their unique ones, and travel as differences.

The real engine computes them on a tiny random model (see daemons.bench.programs.shared_prefix); the store is a cache peer's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome
from daemons.bench.rig import Rig, wait_for
from kakeya_zmq.client import Client
from wire.messages import PrefillPolicy

STORED_BAR = 1.1
CHAT_BAR = 1.05
ASKED_TOKENS, ANSWERED_TOKENS = 50, 30
TINY_VOCABULARY = 512
SHARED_TOKENS, OWN_TOKENS = 2048, 128


def run(rig: Rig, options: BenchOptions) -> Outcome:
    prompts = options.choose(32, 32, 3)
    shared, own = (256, 64) if options.smoke else (SHARED_TOKENS, OWN_TOKENS)
    rig.tell(f"dedupe: {prompts} prompts that share {shared:,} of {shared + own:,} tokens")
    with rig.fleet("dedupe", ("cache",)) as running:
        address = running.member("cache").address
        with rig.program("shared_prefix", address, str(running.psk_file)) as program:
            token_bytes = int(program.ask("load", threads=options.threads)["token_bytes"])
            published = program.ask("publish", prompts=prompts, shared_tokens=shared, own_tokens=own)
            with Client(address, psk_file=running.psk_file) as client:
                stored_bytes = int(client.status().sections["cache"]["bytes_used"] or 0)
            fetched = program.ask("fetch_second")
            model = rig.home / "tiny-model"
            program.ask("write_model", folder=str(model), threads=options.threads)
    chat = _chat(rig, options, model, token_bytes)
    unique_bytes = (shared + prompts * own) * token_bytes
    made_bytes, moved_bytes = sum(published["made_bytes"]), sum(published["moved_bytes"])
    bars = (
        Bar("stored, of the bytes of the unique tokens", stored_bytes / unique_bytes, STORED_BAR, Direction.AT_MOST),
        Bar(
            "moved to fetch prompt 2, of its difference to prompt 1",
            # Prompt 2's own tokens but the last, which is never stored.
            fetched["moved_bytes"] / ((own - 1) * token_bytes),
            1.0,
            Direction.AT_MOST,
        ),
        *(Bar(f"chat, {what}, of its tokens", share, CHAT_BAR, Direction.AT_MOST) for what, share in chat.items()),
    )
    rows = (
        ("all prompts, whole", _megabytes(made_bytes)),
        ("their unique tokens", _megabytes(unique_bytes)),
        ("stored by the cache peer", _megabytes(stored_bytes)),
        ("moved to publish them", _megabytes(moved_bytes)),
        ("a hit of prompt 2 needs", _megabytes(fetched["needed_bytes"])),
        ("moved to fetch prompt 2 after prompt 1", _megabytes(fetched["moved_bytes"])),
    )
    figures = {
        "prompts": prompts,
        "unique_bytes": unique_bytes,
        "stored_bytes": stored_bytes,
        "made_bytes": made_bytes,
        "published_bytes": moved_bytes,
        "chat": dict(chat),
        "fetch": {name: fetched[name] for name in ("moved_bytes", "needed_bytes")},
    }
    title = f"{prompts} prompts, {shared:,} of {shared + own:,} tokens shared, tiny model"
    return Outcome("dedupe", title, ("what", "MB"), rows, bars, figures)


def _chat(rig: Rig, options: BenchOptions, model: Path, token_bytes: int) -> dict[str, float]:
    """A chat with a real primary, answers included: bytes by place, as a share of those of its tokens."""
    turns = options.choose(10, 10, 2)
    rig.tell(f"dedupe: a chat of {turns} turns")
    rng = np.random.default_rng(11)
    with (
        rig.fleet("dedupe-chat", ("primary", "cache"), model=model) as running,
        rig.client(running) as primary,
        Client(running.member("cache").address, psk_file=running.psk_file) as peer,
    ):
        rig.await_peers(running)
        tokens = 0
        with primary.create_session(policy=PrefillPolicy.LOCAL_ONLY) as session:
            for _ in range(turns):
                session.append(rng.integers(2, TINY_VOCABULARY, ASKED_TOKENS).tolist())
                tokens += ASKED_TOKENS + len(list(session.generate(ANSWERED_TOKENS)))
        wait_for("the chat to be published", lambda: primary.status().sections["primary"]["publish_queue"] == 0)
        own, others = primary.status().sections, peer.status().sections
    unit = tokens * token_bytes
    places = {
        "stored by the primary": own["cache"]["bytes_used"],
        "stored by the cache peer": others["cache"]["bytes_used"],
        "moved to publish it": own["prefill"]["bytes_published"],
    }
    return {what: int(size or 0) / unit for what, size in places.items()}


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f}"
