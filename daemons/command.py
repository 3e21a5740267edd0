"""The ``kakeya`` command: one entry, subcommands, errors as one clear line with a documented exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from daemons.console import Console, command_name, fail
from daemons.dashboard_flags import add_dashboard_commands
from daemons.log_files import guard_stray_lines
from daemons.operation_flags import add_operation_commands
from daemons.top_command import add_top_command
from kakeya_zmq import __version__
from kakeya_zmq.options import Option, options_for
from wire.errors import (
    AuthenticationError,
    ConfigError,
    FailureCode,
    InvalidInput,
    KakeyaError,
    NodeInUseError,
    PortInUseError,
    RequestFailed,
    SecretFileError,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_NOT_AUTHENTICATED = 4
EXIT_PORT_IN_USE = 5
EXIT_INTERRUPTED = 130

EPILOG = """\
start here:
  kakeya demo                 set up a fleet on this machine and watch one prompt answered four ways
  kakeya up                   start primary, worker and cache peer in the background
  kakeya chat                 talk to the primary; every turn says what it cost
  kakeya status               what runs, who knows whom, what was reused
  kakeya top                  watch it live in the terminal
  kakeya explain              what the last requests cost, and why
  kakeya doctor               look for what is wrong, and how to mend it
  kakeya down                 stop the fleet

exit codes:
  0 done   1 the request failed   2 bad input or settings   3 nothing answers or no capacity
  4 key missing, unusable or not accepted   5 an address or node id is in use   130 interrupted

files (under ~/.kakeya, or $KAKEYA_HOME):
  fleet.psk                   the fleet's pre-shared key, mode 0600
  tenants/NAME.key            a tenant's key for prompt hashes, mode 0600
  nodes/NODE/identity.key     a node's identity, mode 0600
  logs/  run/                 logs and state of `kakeya up`
"""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage text, and exit with code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy=f"see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. No traceback reaches the user unless KAKEYA_DEBUG is set."""
    try:
        options = build_parser().parse_args(arguments)
        # Asked to stop by a service manager or a closed terminal: clean up as for Ctrl-C. Daemons set handlers of their own.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        guard_stray_lines()
        code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        fail("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KakeyaError as error:
        if os.environ.get("KAKEYA_DEBUG"):
            raise
        fail(str(_with_owner(error)))
        return exit_code(error)
    except Exception as error:
        if os.environ.get("KAKEYA_DEBUG"):
            raise
        fail(f"internal error: {type(error).__name__} (set KAKEYA_DEBUG=1 to see where, and please report it)")
        return EXIT_FAILED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _with_owner(error: KakeyaError) -> KakeyaError:
    """Of an address in use: who has it."""
    if not isinstance(error, PortInUseError):
        return error
    from daemons.port_owner import with_owner

    return with_owner(error)


def exit_code(error: KakeyaError) -> int:
    """The documented exit code of an error."""
    if isinstance(error, SecretFileError | AuthenticationError) or error.code is FailureCode.UNAUTHENTICATED:
        return EXIT_NOT_AUTHENTICATED
    if isinstance(error, PortInUseError | NodeInUseError):
        return EXIT_PORT_IN_USE
    if isinstance(error, InvalidInput) or error.code in (FailureCode.INVALID_ARGUMENT, FailureCode.NOT_FOUND):
        return EXIT_BAD_INPUT
    if error.code in (FailureCode.UNAVAILABLE, FailureCode.DEADLINE_EXCEEDED, FailureCode.RESOURCE_EXHAUSTED):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED


# --- parsers -----------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _command_parser(None, "kakeya", "Share prompt prefill between machines that run the same MLX model.", EPILOG)
    parser.add_argument("--version", action="version", version=f"kakeya-zmq {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_fleet_commands(commands)
    _add_chat(commands)
    _add_daemons(commands)
    _add_key(commands)
    _add_revoke(commands)
    _add_audit(commands)
    _add_model(commands)
    _add_bench(commands)
    add_operation_commands(lambda name, description, examples: _command_parser(commands, name, description, examples))
    add_dashboard_commands(lambda name, description, examples: _command_parser(commands, name, description, examples))
    add_top_command(lambda name, description, examples: _command_parser(commands, name, description, examples))
    return parser


def _command_parser(commands: Any, name: str, description: str, examples: str) -> argparse.ArgumentParser:
    shared: dict[str, Any] = {
        "description": description,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if commands is None:
        return _Parser(prog=name, **shared)
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=description[0].lower() + description[1:].rstrip("."), **shared
    )
    return parser


def _add_fleet_commands(commands: Any) -> None:
    demo = _command_parser(
        commands,
        "demo",
        "Answer one long prompt four ways with a fleet on this machine.",
        "examples:\n  kakeya demo                leave the fleet running afterwards\n"
        "  kakeya demo --once --json  stop it, and print one JSON object as the last line\n",
    )
    demo.add_argument("--once", action="store_true", help="stop the fleet at the end")
    demo.add_argument("--model", default="", metavar="FOLDER", help="MLX model folder (default: the demo model)")
    demo.add_argument("--ephemeral", action="store_true", help="use free ports instead of 51051, 52051 and 53051")
    _json_flag(demo)
    demo.set_defaults(run=_run_demo)
    up = _command_parser(
        commands,
        "up",
        "Start primary, worker and cache peer in the background.",
        "examples:\n  kakeya up\n  kakeya up --model ~/models/Qwen3-8B-4bit --ephemeral\n",
    )
    up.add_argument("--model", default="", metavar="FOLDER", help="MLX model folder (default: the demo model)")
    up.add_argument("--ephemeral", action="store_true", help="use free ports instead of 51051, 52051 and 53051")
    _json_flag(up)
    up.set_defaults(run=_run_up)
    down = _command_parser(commands, "down", "Stop the fleet that `kakeya up` started.", "example:\n  kakeya down\n")
    down.set_defaults(run=_run_down)
    status = _command_parser(
        commands,
        "status",
        "Show what runs, who knows whom, and what was reused.",
        "examples:\n  kakeya status\n  kakeya status --address 192.168.1.20:51051 --json\n",
    )
    status.add_argument(
        "--address", action="append", default=[], metavar="HOST:PORT", help="a node to ask (default: those of this machine)"
    )
    _psk_flag(status)
    _json_flag(status)
    status.set_defaults(run=_run_status)
    _add_views(commands)


def _add_views(commands: Any) -> None:
    explained = _command_parser(
        commands,
        "explain",
        "Show where the KV of the last requests came from, what it cost, and why it was not better.",
        "examples:\n  kakeya explain                    the last 10 requests of the local primary\n"
        "  kakeya explain --last 50 --json\n  kakeya explain --follow           go on with new ones, until interrupted\n",
    )
    explained.add_argument("--last", type=int, default=10, metavar="N", help="how many requests (default 10, at most 256)")
    explained.add_argument("--follow", action="store_true", help="go on with new ones; with --json one object a line")
    kvfs = _command_parser(
        commands,
        "kvfs",
        "Show which namespaces of KV the fleet has, and which node holds how much of each.",
        "examples:\n  kakeya kvfs\n  kakeya kvfs --address 192.168.1.20:51051 --json\n",
    )
    for parser, run in ((explained, _run_explain), (kvfs, _run_kvfs)):
        parser.add_argument("--address", default="", metavar="HOST:PORT", help="the primary (default: the local fleet's)")
        _psk_flag(parser)
        _json_flag(parser)
        parser.set_defaults(run=run)


def _add_chat(commands: Any) -> None:
    chat = _command_parser(
        commands,
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
    _psk_flag(chat)
    _json_flag(chat)
    chat.set_defaults(run=_run_chat)


DAEMON_TEXTS = {
    "primary": (
        "Run a primary: serve sessions and decode.",
        "examples:\n  kakeya primary --enable-prefill-cache --bind 0.0.0.0:51051 --advertise 192.168.1.20:51051 \\\n"
        "      --model ~/models/Qwen3-8B-4bit\n"
        "  kakeya primary --enable-prefill-cache --peer 192.168.1.21:53051 --prefill-policy remote-required\n",
    ),
    "worker": (
        "Run a prefill worker: compute prompts for others.",
        "example (first copy ~/.kakeya/fleet.psk and ~/.kakeya/tenants/default.key from the primary's machine):\n"
        "  kakeya worker --bind 0.0.0.0:53051 --advertise 192.168.1.21:53051 --peer 192.168.1.20:51051 \\\n"
        "      --model ~/models/Qwen3-8B-4bit --cache-gb 8\n",
    ),
    "cache": (
        "Run a cache peer: hold KV for others, without a model.",
        "example (first copy ~/.kakeya/fleet.psk from the primary's machine):\n"
        "  kakeya cache --bind 0.0.0.0:52051 --advertise 192.168.1.22:52051 --peer 192.168.1.20:51051 \\\n"
        "      --cache-gb 8\n",
    ),
}


def _add_daemons(commands: Any) -> None:
    for role, (description, examples) in DAEMON_TEXTS.items():
        parser = _command_parser(
            commands,
            role,
            description,
            examples + "\nEvery setting can also come from the environment (KAKEYA_…) or from the file given by --config;\n"
            "a flag wins over the environment, which wins over the file.\n",
        )
        parser.add_argument(
            "--config", default="", metavar="FILE", help="TOML file (default: ~/.kakeya/kakeya.toml, if any)"
        )
        check_help = "check settings, keys and model folder, and leave"
        parser.add_argument("--check-settings", action="store_true", help=check_help)
        for option in options_for(role):
            _add_option(parser, option)
        parser.set_defaults(run=_run_daemon, role=role)


METAVARS = {
    "bind": "HOST:PORT",
    "bus_bind": "HOST:PORT",
    "advertise": "HOST:PORT",
    "peer": "HOST:PORT",
    "bulk_ports": "LOW-HIGH",
    "assert_compatibility": "FIELD=VALUE",
}
"""What stands for the value in the help; other settings show their kind."""


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    default = "" if option.default in ("", ()) else f" (default: {option.default})"
    metavar = METAVARS.get(option.name, option.kind.upper())
    text = f"{option.help}{default}".replace("%", "%%")
    if option.kind == "list":
        parser.add_argument(option.flag, action="append", default=None, metavar=metavar, help=text)
    elif option.kind == "choice":
        parser.add_argument(option.flag, default=None, metavar="{" + ",".join(option.choices) + "}", help=text)
    elif option.kind == "switch":
        parser.add_argument(option.flag, nargs="?", const="1", default=None, metavar="0|1", help=text)
    else:
        parser.add_argument(option.flag, default=None, metavar=metavar, help=text)


def _add_key(commands: Any) -> None:
    key = _command_parser(
        commands,
        "key",
        "Make, rotate or retire the fleet's key, make the telemetry-read key, forget a node's key, or show their state.",
        "examples:\n  kakeya key new      make ~/.kakeya/fleet.psk; copy it to every machine of the fleet\n"
        "  kakeya key rotate   add a new key to that file, the old one stays valid; running nodes read it by themselves\n"
        "  kakeya key retire   take the oldest key (or the one with that id) out of it, once every machine has the new one\n"
        "  kakeya key forget old-mac   take whatever key comes next under that name: for a machine that was set up anew\n"
        "  kakeya key telemetry    make ~/.kakeya/telemetry.key of it, all that a dashboard elsewhere needs\n"
        "  kakeya key show     whether the keys are there and safe; never shows a key itself\n",
    )
    key.add_argument("action", choices=("new", "rotate", "retire", "telemetry", "forget", "show"))
    key.add_argument("argument", nargs="?", default="", metavar="NAME", help="of forget: a node; of retire: a key id")
    _psk_flag(key)
    _json_flag(key)
    key.set_defaults(run=_run_key)


def _add_revoke(commands: Any) -> None:
    revoke = _command_parser(
        commands,
        "revoke",
        "Refuse a node's identity key on every node of the fleet, for good.",
        "examples:\n  kakeya revoke lost-macbook    signed by the node of this machine, told to those that run here\n"
        "  kakeya revoke lost-macbook --as primary-mac --address 192.168.1.20:51051\n"
        "A machine that is lost also knows the fleet's key: make a new one (`kakeya key rotate`, `kakeya key retire`).\n",
    )
    revoke.add_argument("node", metavar="NODE", help="the name it is known under")
    revoke.add_argument("--as", dest="issuer", default="", metavar="NODE", help="the node of this machine that signs")
    revoke.add_argument("--public-key", default="", metavar="HEX", help="its key (default: the one known for that name)")
    revoke.add_argument(
        "--address", action="append", default=[], metavar="HOST:PORT", help="a node to tell (default: the local fleet)"
    )
    _psk_flag(revoke)
    _json_flag(revoke)
    revoke.set_defaults(run=_run_revoke)


def _add_audit(commands: Any) -> None:
    audit = _command_parser(
        commands,
        "audit",
        "Show who was refused, who came in for the first time, and which keys changed.",
        "examples:\n  kakeya audit                       the last 50 entries of the nodes on this machine\n"
        "  kakeya audit --node-id primary-mac --last 500 --json\n  kakeya audit --follow\n",
    )
    audit.add_argument(
        "--node-id", action="append", default=[], metavar="NAME", help="a node of this machine (default: all); repeatable"
    )
    audit.add_argument("--last", type=int, default=50, metavar="N", help="how many of the entries so far (default 50)")
    audit.add_argument("--follow", action="store_true", help="go on with new entries, until interrupted")
    audit.add_argument("--json", action="store_true", help="one JSON object a line, one line an entry")
    audit.set_defaults(run=_run_audit)


def _add_model(commands: Any) -> None:
    model = _command_parser(
        commands,
        "model",
        "Prepare the demo model.",
        "example:\n  kakeya model prepare    convert Gemma 3 270M once (about 1 GB on disk), verified by digests\n",
    )
    model.add_argument("action", choices=("prepare",))
    model.add_argument("--verify", action="store_true", help="check the digest of every file of a model prepared before")
    _json_flag(model)
    model.set_defaults(run=_run_model)


def _add_bench(commands: Any) -> None:
    from daemons.bench import BENCHMARKS, BY_NAME_ONLY

    bench = _command_parser(
        commands,
        "bench",
        "Measure this machine beside what one would use instead.",
        "examples:\n  kakeya bench                        everything, short: an indication\n"
        "  kakeya bench transfer --peers       one benchmark, also against gRPC, Redis and plain TCP where installed\n"
        "  kakeya bench --long --check --json  the run that the bars of docs/performance.md are judged on\n",
    )
    names_help = f"{', '.join(BENCHMARKS)}; or all (default): all but {' and '.join(BY_NAME_ONLY)}"
    bench.add_argument("names", nargs="*", metavar="NAME", help=names_help)
    bench.add_argument("--check", action="store_true", help="exit with 1 unless every bar holds")
    bench.add_argument("--long", action="store_true", help="more and longer prompts, more rounds: at most 8 minutes")
    bench.add_argument("--peers", action="store_true", help="with transfer: gRPC, Redis and plain TCP too, where installed")
    rounds_help = "samples of each side (default: what each needs)"
    bench.add_argument("--rounds", type=int, default=None, metavar="N", help=rounds_help)
    bench.add_argument("--model", default="", metavar="FOLDER", help="MLX model folder (default: the demo model)")
    threads_help = "BLAS threads of every process that computes (default: half the cores)"
    bench.add_argument("--threads", type=int, default=None, metavar="N", help=threads_help)
    bench.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    _json_flag(bench)
    bench.set_defaults(run=_run_bench)


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of standard output")


def _psk_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fleet-psk-file", default="", metavar="FILE", help="the fleet's key (default: ~/.kakeya/fleet.psk)"
    )


# --- commands: imports are inside, so that --help and `status` need no model library ----------------------------------


def _psk_file(options: argparse.Namespace) -> Path:
    from daemons.fleet import default_psk_file

    named = options.fleet_psk_file or os.environ.get("KAKEYA_FLEET_PSK_FILE", "")
    return Path(named).expanduser() if named else default_psk_file()


def _run_daemon(options: argparse.Namespace) -> int:
    # Before NumPy is loaded: its own BLAS must not fight with the model's over the cores. The model's is set by name.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from daemons.run import leave

    used_before = "mlx.core" in sys.modules
    try:
        code = _serve(options)
    except KakeyaError as error:
        if used_before or "mlx.core" not in sys.modules or os.environ.get("KAKEYA_DEBUG"):
            raise
        fail(str(error))
        code = exit_code(error)
    if not used_before and "mlx.core" in sys.modules:
        leave(code)
    return code


def _serve(options: argparse.Namespace) -> int:
    from daemons.addresses import check_addresses
    from daemons.run import run_daemon, set_up_logging
    from kakeya_zmq.config import find_config_file, resolve_settings

    flags = {option.name: getattr(options, option.name) for option in options_for(options.role)}
    resolved = resolve_settings(options.role, flags, file=find_config_file(options.config))
    settings = resolved.settings
    if options.check_settings:
        from daemons.check import check_settings

        check_settings(resolved)
        return EXIT_OK
    check_addresses(resolved)
    set_up_logging(settings.log_level, settings.log_format)
    match options.role:
        case "primary":
            from daemons.primary import Primary

            return run_daemon(settings, lambda reactor: Primary(reactor, settings))
        case "worker":
            from daemons.worker import Worker

            return run_daemon(settings, lambda reactor: Worker(reactor, settings))
        case _:
            from daemons.cache import Cache

            return run_daemon(settings, lambda reactor: Cache(reactor, settings))


def _run_demo(options: argparse.Namespace) -> int:
    from daemons import fleet
    from daemons.demonstration import demonstrate

    console = Console(json_mode=options.json)
    running = fleet.find_member("primary")
    model = options.model or (running.option("--model") if running else "")
    folder = _prepared_model(console, model)
    ours = not fleet.live_members()
    finished = False
    try:
        _show_members(console, fleet.start_fleet(_local_plan(model, ephemeral=options.ephemeral), console.say))
        outcome = demonstrate(console, fleet.default_psk_file(), folder)
        finished = True
    finally:
        # An interrupted demonstration leaves nothing running that it started.
        if options.once or (ours and not finished):
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

    # Two processes that share one machine's cores slow each other down many times over unless each keeps to its share.
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    extra = tuple((role, ("--blas-threads", threads)) for role in ("primary", "worker"))
    return FleetPlan(model=str(Path(model).expanduser().resolve()) if model else "", ephemeral=ephemeral, extra=extra)


def _prepared_model(console: Console, model: str) -> Path:
    if model:
        return Path(model).expanduser()
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

    return show_status(Console(json_mode=options.json), tuple(options.address), _psk_file(options))


def _run_explain(options: argparse.Namespace) -> int:
    from daemons.explain import explain

    with _primary_at(options) as address:
        console = Console(json_mode=options.json)
        return explain(console, address, _psk_file(options), count=options.last, follow=options.follow)


def _run_kvfs(options: argparse.Namespace) -> int:
    from daemons.explain import show_kvfs

    with _primary_at(options) as address:
        return show_kvfs(Console(json_mode=options.json), address, _psk_file(options))


@contextlib.contextmanager
def _primary_at(options: argparse.Namespace) -> Iterator[Any]:
    """The address that was given, or the local fleet's; says how to get one when nothing answers there."""
    from daemons import fleet
    from kakeya_zmq.io.sockets import parse_address

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

    chat_options = ChatOptions(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=tuple(options.stop) if options.stop else ChatOptions().stop,
    )
    folder = Path(options.model).expanduser() if options.model else demo_model_folder()
    with _primary_at(options) as address:
        return run_chat(Console(json_mode=options.json), address, _psk_file(options), folder, chat_options, options.message)


def _run_key(options: argparse.Namespace) -> int:
    from daemons.keys_command import key_states, run_key_action

    console = Console(json_mode=options.json)
    path = _psk_file(options)
    if done := run_key_action(options.action, options.argument, path):
        console.say(done)
    states = key_states(path)
    console.table("keys", ("key", "state"), [(state["key"], state["state"]) for state in states])
    if options.json:
        console.result({"keys": states})
    return EXIT_OK if all(state["usable"] for state in states) else EXIT_NOT_AUTHENTICATED


def _run_revoke(options: argparse.Namespace) -> int:
    from daemons.revoke_command import revoke

    console = Console(json_mode=options.json)
    told = revoke(
        options.node,
        issuer=options.issuer,
        public_key=options.public_key,
        addresses=options.address,
        psk_file=_psk_file(options),
    )
    key = told.revocation.identity_public_key.hex()
    console.say(f"revoked the identity key {key} of {options.node}, signed by {told.revocation.issuer_id}")
    if told.addresses:
        console.say(f"told {', '.join(told.addresses)}; it spreads from there")
    else:
        console.say(f"no node was reached: {told.revocation.issuer_id} spreads it, when it runs")
    for line in told.unreached:
        console.say(f"not told: {line}")
    if options.json:
        found = {"node_id": options.node, "public_key": key, "told": list(told.addresses), "not_told": list(told.unreached)}
        console.result(found)
    return EXIT_OK


def _run_audit(options: argparse.Namespace) -> int:
    from daemons.audit_command import show_audit

    if options.last < 0:
        raise ConfigError("--last is a whole number from 0")
    return show_audit(tuple(options.node_id), last=options.last, follow=options.follow, as_json=options.json)


def _run_model(options: argparse.Namespace) -> int:
    from kakeya_zmq.demo.prepare import prepare_demo_model

    console = Console(json_mode=options.json)
    with console.progress("demo model") as show:
        folder = prepare_demo_model(on_progress=lambda step, share: show(round(share * 100), 100), verify=options.verify)
    console.say(f"the demo model is ready in {folder}")
    if options.json:
        console.result({"folder": str(folder)})
    return EXIT_OK


def _run_bench(options: argparse.Namespace) -> int:
    from daemons.bench import BENCHMARKS, BY_NAME_ONLY
    from daemons.bench.harness import BenchOptions
    from daemons.bench.run import run_benchmarks

    threads_max = int(next(option.maximum for option in options_for("worker") if option.name == "blas_threads") or 0)
    if options.rounds is not None and options.rounds < 1:
        raise ConfigError(f"--rounds is a whole number of at least 1, not {options.rounds}")
    if options.threads is not None and not 1 <= options.threads <= threads_max:
        raise ConfigError(f"--threads is a whole number from 1 to {threads_max}, not {options.threads}")
    chosen = set(options.names) or {"all"}
    if unknown := sorted(chosen - {*BENCHMARKS, "all"}):
        raise ConfigError(f"there is no benchmark {unknown[0]!r}", remedy=f"one of: {', '.join(BENCHMARKS)}, all")
    names = [name for name in BENCHMARKS if name in chosen or ("all" in chosen and name not in BY_NAME_ONLY)]
    measured = BenchOptions(
        long=options.long,
        peers=options.peers,
        rounds=options.rounds or 0,
        threads=options.threads or max(1, (os.cpu_count() or 2) // 2),
        model=options.model,
        smoke=options.smoke,
    )
    return run_benchmarks(names, measured, Console(json_mode=options.json), json=options.json, check=options.check)
