"""The flags of ``kakeya key``, ``revoke`` and ``audit``; what they do is only imported when they run."""

from __future__ import annotations

import argparse

from daemons.console import Console
from daemons.exit_codes import EXIT_NOT_AUTHENTICATED, EXIT_OK
from daemons.flags import AddCommand, json_flag, psk_file, psk_flag
from wire.errors import ConfigError


def add_key_commands(add: AddCommand) -> None:
    """Add the three."""
    _add_key(add)
    _add_revoke(add)
    _add_audit(add)


def _add_key(add: AddCommand) -> None:
    key = add(
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
    psk_flag(key)
    json_flag(key)
    key.set_defaults(run=_run_key)


def _add_revoke(add: AddCommand) -> None:
    revoke = add(
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
    psk_flag(revoke)
    json_flag(revoke)
    revoke.set_defaults(run=_run_revoke)


def _add_audit(add: AddCommand) -> None:
    audit = add(
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


def _run_key(options: argparse.Namespace) -> int:
    from daemons.keys_command import key_states, run_key_action

    console = Console(json_mode=options.json)
    path = psk_file(options)
    for line in run_key_action(options.action, options.argument, path).splitlines():
        console.say(line)
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
        psk_file=psk_file(options),
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
