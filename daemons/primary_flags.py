"""The flags of ``kakeya explain``, ``kvfs`` and ``chat``, which ask a primary; what they do is imported when they run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from daemons.console import Console, command_name
from daemons.flags import AddCommand, json_flag, psk_file, psk_flag
from wire.errors import FailureCode, RequestFailed


def add_primary_commands(add: AddCommand) -> None:
    """Add the three."""
    _add_views(add)
    _add_chat(add)


def _add_views(add: AddCommand) -> None:
    explained = add(
        "explain",
        "Show where the KV of the last requests came from, what it cost, and why it was not better.",
        "examples:\n  kakeya explain                    the last 10 requests of the local primary\n"
        "  kakeya explain --last 50 --json\n  kakeya explain --follow           go on with new ones, until interrupted\n",
    )
    explained.add_argument("--last", type=int, default=10, metavar="N", help="how many requests (default 10, at most 256)")
    explained.add_argument("--follow", action="store_true", help="go on with new ones; with --json one object a line")
    kvfs = add(
        "kvfs",
        "Show which namespaces of KV the fleet has, and which node holds how much of each.",
        "examples:\n  kakeya kvfs\n  kakeya kvfs --address 192.168.1.20:51051 --json\n",
    )
    for parser, run in ((explained, _run_explain), (kvfs, _run_kvfs)):
        parser.add_argument("--address", default="", metavar="HOST:PORT", help="the primary (default: the local fleet's)")
        psk_flag(parser)
        json_flag(parser)
        parser.set_defaults(run=run)


def _add_chat(add: AddCommand) -> None:
    chat = add(
        "chat",
        "Talk to the primary.",
        "examples:\n  kakeya chat\n  kakeya chat -m 'The capital of France is' --max-tokens 20 --json\n"
        "  kakeya chat --address 192.168.1.20:51051 --temperature 0.7 --seed 7\n",
    )
    chat.add_argument("-m", "--message", metavar="TEXT", help="say one thing, print the answer and leave")
    chat.add_argument("--address", default="", metavar="HOST:PORT", help="the primary (default: the local fleet's)")
    chat.add_argument(
        "--model", default="", metavar="FOLDER", help="folder with the model's tokenizer (default: the demo model)"
    )
    chat.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default 256)")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    chat.add_argument("--top-p", type=float, default=0.0, help="0 is off (default)")
    chat.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    chat.add_argument("--seed", type=int, help="makes sampling repeatable")
    chat.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer (default: a new user turn)")
    psk_flag(chat)
    json_flag(chat)
    chat.set_defaults(run=_run_chat)


def _run_explain(options: argparse.Namespace) -> int:
    from daemons.explain import explain

    with _primary_at(options) as address:
        console = Console(json_mode=options.json)
        return explain(console, address, psk_file(options), count=options.last, follow=options.follow)


def _run_kvfs(options: argparse.Namespace) -> int:
    from daemons.explain import show_kvfs

    with _primary_at(options) as address:
        return show_kvfs(Console(json_mode=options.json), address, psk_file(options))


@contextlib.contextmanager
def _primary_at(options: argparse.Namespace) -> Iterator[Any]:
    """The address that was given, or the local fleet's; says how to get one when nothing answers there."""
    from daemons import fleet
    from kakeya_zmq.io.addresses import parse_address

    address = parse_address(options.address) if options.address else fleet.primary_address()
    try:
        yield address
    except RequestFailed as error:
        if error.code is not FailureCode.UNAVAILABLE or options.address or fleet.find_member("primary"):
            raise
        remedy = f"start a fleet with `{command_name()} up`, or name a primary with --address"
        raise RequestFailed(FailureCode.UNAVAILABLE, f"no primary answers at {address}", remedy=remedy) from None


def _run_chat(options: argparse.Namespace) -> int:
    from daemons.chat import ChatOptions, run_chat
    from kakeya_zmq.demo.prepare import demo_model_folder
    from kakeya_zmq.user_paths import user_path

    chat_options = ChatOptions(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=tuple(options.stop) if options.stop else ChatOptions().stop,
    )
    folder = user_path(options.model, "--model") if options.model else demo_model_folder()
    with _primary_at(options) as address:
        return run_chat(Console(json_mode=options.json), address, psk_file(options), folder, chat_options, options.message)
