"""The flags of ``kakeya demo``, ``up``, ``down`` and ``status``; what they do is only imported when they run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daemons.console import Console, command_name
from daemons.exit_codes import EXIT_FAILED, EXIT_OK
from daemons.flags import AddCommand, json_flag, psk_file, psk_flag


def add_fleet_commands(add: AddCommand) -> None:
    """Add the four."""
    demo = add(
        "demo",
        "Answer one long prompt four ways with a fleet on this machine.",
        "examples:\n  kakeya demo                leave the fleet running afterwards\n"
        "  kakeya demo --once --json  stop it, and print one JSON object as the last line\n",
    )
    demo.add_argument("--once", action="store_true", help="stop the fleet at the end")
    demo.add_argument("--model", default="", metavar="FOLDER", help="MLX model folder (default: the demo model)")
    demo.add_argument("--ephemeral", action="store_true", help="use free ports instead of 51051, 52051 and 53051")
    json_flag(demo)
    demo.set_defaults(run=_run_demo)
    up = add(
        "up",
        "Start primary, worker and cache peer in the background.",
        "examples:\n  kakeya up\n  kakeya up --model ~/models/Qwen3-8B-4bit --ephemeral\n",
    )
    up.add_argument("--model", default="", metavar="FOLDER", help="MLX model folder (default: the demo model)")
    up.add_argument("--ephemeral", action="store_true", help="use free ports instead of 51051, 52051 and 53051")
    json_flag(up)
    up.set_defaults(run=_run_up)
    down = add("down", "Stop the fleet that `kakeya up` started.", "example:\n  kakeya down\n")
    down.set_defaults(run=_run_down)
    status = add(
        "status",
        "Show what runs, who knows whom, and what was reused.",
        "examples:\n  kakeya status\n  kakeya status --address 192.168.1.20:51051 --json\n",
    )
    status.add_argument(
        "--address", action="append", default=[], metavar="HOST:PORT", help="a node to ask (default: those of this machine)"
    )
    psk_flag(status)
    json_flag(status)
    status.set_defaults(run=_run_status)


def _run_demo(options: argparse.Namespace) -> int:
    from daemons import fleet
    from daemons.demonstration import demonstrate
    from wire.errors import FleetBusyError

    console = Console(json_mode=options.json)
    running = fleet.find_member("primary")
    model = options.model or (running.option("--model") if running else "")
    folder = _prepared_model(console, model)
    ours = not fleet.live_members()
    finished = busy = False
    try:
        _show_members(console, fleet.start_fleet(_local_plan(model, ephemeral=options.ephemeral), console.say))
        outcome = demonstrate(console, fleet.default_psk_file(), folder)
        finished = True
    except FleetBusyError:
        busy = True
        raise
    finally:
        # An interrupted demonstration leaves nothing running that it started, and lets alone what another command starts.
        if not busy and (options.once or (ours and not finished)):
            fleet.stop_fleet(console.say)
    if not options.once:
        _start_dashboard(console, ephemeral=options.ephemeral)
        name = command_name()
        console.say("")
        console.say(f"the fleet keeps running: try `{name} status`, `{name} chat`; `{name} down` stops it")
    if options.json:
        console.result(outcome.as_json())
    return EXIT_OK if outcome.ok else EXIT_FAILED


def _run_up(options: argparse.Namespace) -> int:
    from daemons import fleet

    console = Console(json_mode=options.json)
    _prepared_model(console, options.model)
    members = fleet.start_fleet(_local_plan(options.model, ephemeral=options.ephemeral), console.say)
    _show_members(console, members)
    url = _start_dashboard(console, ephemeral=options.ephemeral)
    if options.json:
        rows = [{"role": m.role, "node_id": m.node_id, "address": m.address, "pid": m.pid} for m in members]
        console.result({"members": rows, "dashboard": url})
    return EXIT_OK


def _start_dashboard(console: Console, *, ephemeral: bool) -> str:
    from daemons.dashboard_process import start_dashboard, url_of

    member = start_dashboard(console.say, ephemeral=ephemeral)
    if member is None:
        return ""
    console.say(f"dashboard: {url_of(member)}")
    return url_of(member)


def _local_plan(model: str, *, ephemeral: bool) -> Any:
    from daemons.fleet import FleetPlan
    from kakeya_zmq.user_paths import user_path

    # Two processes that share one machine's cores slow each other down many times over unless each keeps to its share.
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    extra = tuple((role, ("--blas-threads", threads)) for role in ("primary", "worker"))
    folder = str(user_path(model, "--model").resolve()) if model else ""
    return FleetPlan(model=folder, ephemeral=ephemeral, extra=extra)


def _prepared_model(console: Console, model: str) -> Path:
    if model:
        from kakeya_zmq.user_paths import user_path

        return user_path(model, "--model")
    from kakeya_zmq.demo.prepare import prepare_demo_model

    with console.progress("demo model") as show:
        return prepare_demo_model(on_progress=lambda step, share: show(round(share * 100), 100))


def _show_members(console: Console, members: Sequence[Any]) -> None:
    rows = [(m.role, m.node_id, m.address, str(m.pid)) for m in members]
    console.table("the fleet", ("role", "node", "listens on", "process"), rows)


def _run_down(options: argparse.Namespace) -> int:
    from daemons import fleet

    console = Console()
    count = fleet.stop_fleet(console.say)
    console.say(f"stopped {count} processes" if count else "no fleet was running")
    return EXIT_OK


def _run_status(options: argparse.Namespace) -> int:
    from daemons.status import show_status

    return show_status(Console(json_mode=options.json), tuple(options.address), psk_file(options))
