"""The flags of ``kakeya bench``, which measures, and of ``kakeya model``, which makes what is measured with."""

from __future__ import annotations

import argparse
import os

from daemons.console import Console
from daemons.exit_codes import EXIT_OK
from daemons.flags import AddCommand, json_flag
from kakeya_zmq.options import options_for
from wire.errors import ConfigError


def add_bench_commands(add: AddCommand) -> None:
    """Add the two."""
    _add_model(add)
    _add_bench(add)


def _add_model(add: AddCommand) -> None:
    model = add(
        "model",
        "Prepare the demo model.",
        "example:\n  kakeya model prepare    convert Gemma 3 270M once (about 1 GB on disk), verified by digests\n",
    )
    model.add_argument("action", choices=("prepare",))
    model.add_argument("--verify", action="store_true", help="check the digest of every file of a model prepared before")
    json_flag(model)
    model.set_defaults(run=_run_model)


def _add_bench(add: AddCommand) -> None:
    from daemons.bench import BENCHMARKS, BY_NAME_ONLY

    bench = add(
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
    json_flag(bench)
    bench.set_defaults(run=_run_bench)


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
    if "all" in chosen and (included := [name for name in BENCHMARKS if name in chosen and name not in BY_NAME_ONLY]):
        raise ConfigError(f"all has {included[0]} in it", remedy=f"name either all or {', '.join(included)}")
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
