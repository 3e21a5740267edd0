"""``kakeya dashboard``: the JSON API and the page as one process, fed by the telemetry bus; and ``kakeya pair``.

Composition only: it reads the keys, opens the database, starts the feed and the web server, and ends them in order. The
process holds the telemetry-read key, never the PSK: where the key's file is missing and the PSK is on this machine, the
file is made first, and the PSK is dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemons.console import Console
from daemons.dashboard_flags import dashboard_bind
from daemons.environment_names import unknown_variables
from daemons.log_files import LogRotation
from daemons.run import check_ready_file, remove_ready_files, set_up_logging, stop_signals, write_ready_file
from dashboard.app import create_app
from dashboard.benchmark_store import BenchmarkStore
from dashboard.database import Database
from dashboard.discovery import local_buses
from dashboard.feed import BusFeed
from dashboard.hosts import host_rule
from dashboard.hub import LiveFleet
from dashboard.ledger import ended
from dashboard.pairing import make_claim
from dashboard.server import WebServer, is_loopback
from dashboard.services import Services
from dashboard.speakers import speakers_of
from dashboard.state import NetworkState
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.descriptors import raise_descriptor_limit
from kakeya_zmq.user_paths import user_path
from wire.errors import AuthenticationError, ConfigError, FailureCode, InvalidInput, RequestFailed, SecretFileError
from wire.keys import FleetKey, NodeIdentity, TelemetryKey, read_secret_file, write_secret_file
from wire.limits import MIB

API_KEY_VARIABLE = "KAKEYA_NETWORK_API_KEY"
API_KEY_FILE = "network_api_key"
TELEMETRY_KEY_FILE = "telemetry.key"
API_KEY_BYTES_ADVISED = 16
ABSENT_API_KEY = "make it: openssl rand -hex 24 > FILE; chmod 600 FILE; or name none, which closes writes"
HOUSEKEEPING_SECONDS = 15.0
"""How often counters are kept and expired registrations deleted."""
PAIR_TIMEOUT_SECONDS = 15.0
LOG_BYTES_MAX = 10 * MIB
"""As --log-max-mb of the other daemons."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """``bus``: buses to listen to, besides those of this machine's nodes. Paths None: under the home; no ready file.

    ``allowed_hosts``: names it answers to, besides its own.
    """

    bind: Address
    bus: tuple[Address, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    telemetry_key_file: Path | None = None
    api_key_file: Path | None = None
    state_file: Path | None = None
    fleet_psk_file: Path | None = None
    ready_file: Path | None = None
    log_level: str = "info"


# --- keys ------------------------------------------------------------------------------------------------------------


def load_telemetry_key(file: Path, psk_file: Path) -> TelemetryKey:
    """The telemetry-read key; its file is made from the PSK when only that is there, and made anew when the PSK changed.

    Raises:
        SecretFileError: neither file can be used.
    """
    if psk_file.exists():
        write_telemetry_key(file, psk_file)
    elif not file.exists():
        text = f"the telemetry key file {file} does not exist"
        raise SecretFileError(text, remedy="copy it from a machine of the fleet, where `kakeya key telemetry` makes it")
    return TelemetryKey.load(file)


def write_telemetry_key(file: Path, psk_file: Path) -> bool:
    """Make the file with the telemetry-read key of a PSK; whether it was not there already.

    Raises:
        SecretFileError: the PSK cannot be used.
        ConfigError: the file cannot be written.
    """
    key = FleetKey.load(psk_file).telemetry_key()
    if file.exists():
        with contextlib.suppress(SecretFileError):
            if TelemetryKey.load(file).secret == key.secret:
                return False
        file.unlink()
    write_secret_file(file, key.to_text() + b"\n")
    return True


def load_api_key(named: Path | None, home: Path) -> bytes:
    """The API key of the environment, else of the file; empty when there is none, which closes writes.

    Args:
        named: the file that somebody wrote down, which has to be there; None: the one under the home, if any.

    Raises:
        SecretFileError: the file is open to others or cannot be read, or was named and is missing.
    """
    given = os.environ.get(API_KEY_VARIABLE, "").strip()
    if given:
        return given.encode()
    file = named or home / API_KEY_FILE
    if named is None and not file.exists():
        return b""
    if file.exists() and file.stat().st_size == 0:
        return b""
    return read_secret_file(file, minimum_bytes=0, what="API key", absent=ABSENT_API_KEY)


# --- the process -------------------------------------------------------------------------------------------------------


class Dashboard:
    """Everything that runs in the process of the dashboard.

    Raises:
        KakeyaError: a key, the database or the address cannot be used.
    """

    def __init__(self, options: DashboardOptions, home: Path) -> None:
        psk_file = options.fleet_psk_file or home / "fleet.psk"
        named = options.telemetry_key_file
        # A file that is named may be another fleet's: it is read and never written.
        key = TelemetryKey.load(named) if named else load_telemetry_key(home / TELEMETRY_KEY_FILE, psk_file)
        self.api_key = load_api_key(options.api_key_file, home)
        hosts = host_rule(options.bind.host, options.allowed_hosts)
        with contextlib.ExitStack() as undo:
            database = Database(options.state_file or home / "dashboard" / "network.sqlite3")
            undo.callback(database.close)
            self.state = NetworkState(database)
            self.fleet = LiveFleet()
            self._paired_at, self._paired_keys = -1, dict[str, bytes]()
            speakers = speakers_of(home, key, named, paired=self._paired)
            rows = self.state.load_counters()
            # Under whose key a name counted before is not known any more: the next one may have any incarnation.
            self.fleet.restore([row if speakers.knows(row.node_id) else ended(row) for row in rows])
            feed = BusFeed(self.fleet, key, addresses=options.bus, discover=lambda: local_buses(home), speakers=speakers)
            undo.callback(feed.close)
            services = Services(
                fleet=self.fleet,
                state=self.state,
                benchmarks=BenchmarkStore(database),
                api_key=self.api_key,
                feed_figures=feed.figures,
            )
            self.server = WebServer(create_app(services, hosts), options.bind)
            undo.callback(self.server.close)
            undo.callback(self.fleet.close)
            feed.start()
            self.server.start()
            self._undo = undo.pop_all()

    @property
    def url(self) -> str:
        return f"http://{self.server.address}/"

    def _paired(self) -> dict[str, bytes]:
        """Of the nodes that were paired: node id → key. Asked every second, read when something was written."""
        if self._paired_at != self.state.changes:
            self._paired_at = self.state.changes
            paired = self.state.registrations(time.time())
            self._paired_keys = {each.node_id: each.public_key for each in paired if each.node_id and each.public_key}
        return self._paired_keys

    def keep(self) -> None:
        """Keep the sums of the nodes' counters, and delete what has expired."""
        now = time.time()
        rows = self.fleet.read(lambda view, _: view.ledger.take_changed())
        if rows:
            self.state.save_counters(rows, now)
        self.state.prune(now)

    def close(self) -> None:
        """End everything, in order: readers, server, feed, database."""
        with contextlib.suppress(Exception):  # a full disk must not keep the process from ending
            self.keep()
        self._undo.close()


def run_dashboard(options: DashboardOptions) -> int:
    """Serve until told to stop.

    Raises:
        KakeyaError: it could not start.
    """
    set_up_logging(options.log_level)
    for unknown in unknown_variables():
        _log.warning("%s", unknown)
    logging.getLogger("waitress").setLevel(logging.ERROR)
    raise_descriptor_limit()
    if options.ready_file:
        check_ready_file(str(options.ready_file))
    stopped = threading.Event()
    reasons: list[str] = []

    def stop(reason: str) -> None:
        reasons.append(reason)
        stopped.set()

    def forget() -> None:
        if options.ready_file:
            remove_ready_files(str(options.ready_file))

    rotation = LogRotation(LOG_BYTES_MAX)
    with stop_signals(stop, forget):
        dashboard = Dashboard(options, kakeya_home())
        try:
            _tell(dashboard, options)
            while not stopped.wait(HOUSEKEEPING_SECONDS):
                rotation.look()
                try:
                    dashboard.keep()
                except Exception as error:  # the disk may be full for a while; serving goes on
                    _log.error("the state could not be kept: %s", type(error).__name__)
        finally:
            dashboard.close()
            forget()
    _log.info("stopped: %s", reasons[0] if reasons else "done")
    return 0


def check_dashboard(options: DashboardOptions, home: Path) -> None:
    """Read the keys as :func:`run_dashboard` would; nothing is made, bound or started.

    Raises:
        SecretFileError: a key is missing or cannot be used.
        ConfigError: an allowed host is no name.
    """
    psk_file = options.fleet_psk_file or home / "fleet.psk"
    if psk_file.exists() and not options.telemetry_key_file:
        FleetKey.load(psk_file)
    else:
        TelemetryKey.load(options.telemetry_key_file or home / TELEMETRY_KEY_FILE)
    load_api_key(options.api_key_file, home)
    host_rule(options.bind.host, options.allowed_hosts)


def _tell(dashboard: Dashboard, options: DashboardOptions) -> None:
    address = dashboard.server.address
    if not is_loopback(address.host):
        _log.warning("the dashboard can be reached from other machines: what is public is readable by all of them")
    if not dashboard.api_key:
        _log.warning("no API key is configured: writes are closed")
    elif len(dashboard.api_key) < API_KEY_BYTES_ADVISED:
        _log.warning("the API key is short: %d characters or more are advised", API_KEY_BYTES_ADVISED)
    facts = {"pid": os.getpid(), "role": "dashboard", "node_id": "dashboard", "address": str(address), "url": dashboard.url}
    if options.ready_file:
        write_ready_file(str(options.ready_file), facts)
    _log.info("dashboard serves on %s", dashboard.url)


# --- command line ----------------------------------------------------------------------------------------------------


def options_from(parsed: Any) -> DashboardOptions:
    """The options of the parsed command line; what is not given comes from the environment.

    Raises:
        ConfigError: an address cannot be parsed, or a path begins with the home folder of an unknown user.
    """
    bus = _listed(parsed.bus, "KAKEYA_DASHBOARD_BUS")
    hosts = _listed(parsed.allow_host, "KAKEYA_DASHBOARD_ALLOW_HOST")
    return DashboardOptions(
        bind=parse_address(dashboard_bind(parsed.bind, os.environ)),
        bus=tuple(parse_address(text) for text in bus),
        allowed_hosts=tuple(hosts),
        telemetry_key_file=_named(parsed.telemetry_key_file, "--telemetry-key-file", "KAKEYA_TELEMETRY_KEY_FILE"),
        api_key_file=_named(parsed.api_key_file, "--api-key-file", "KAKEYA_NETWORK_API_KEY_FILE"),
        state_file=_named(parsed.state, "--state", "KAKEYA_DASHBOARD_STATE"),
        fleet_psk_file=_named("", "", "KAKEYA_FLEET_PSK_FILE"),
        ready_file=user_path(parsed.ready_file, "--ready-file") if parsed.ready_file else None,
        log_level=parsed.log_level,
    )


def _named(given: str, flag: str, variable: str) -> Path | None:
    """The path of a flag, else of a variable; None when neither says one."""
    if given:
        return user_path(given, flag)
    text = os.environ.get(variable, "")
    return user_path(text, variable) if text else None


def _listed(flags: Sequence[str], variable: str) -> list[str]:
    """The texts of a repeated flag, each with commas or not; without any, of a variable."""
    texts = flags or [os.environ.get(variable, "")]
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


# --- pairing -----------------------------------------------------------------------------------------------------------


def pair(parsed: Any) -> int:
    """Prove a pairing token and the key of a local node to a dashboard; the exit code.

    Raises:
        AuthenticationError: the dashboard does not accept the proof.
        InvalidInput: the token is unknown, expired or used.
        RequestFailed: the dashboard does not answer.
    """
    console = Console(json_mode=parsed.json)
    identity_file = kakeya_home() / "nodes" / parsed.node_id / "identity.key"
    if not identity_file.exists():
        raise ConfigError(f"the node {parsed.node_id} has no identity here", remedy="start it once, or check --node-id")
    if sys.stdin.isatty():
        console.say("paste the pairing token, then press Enter:")
    token = sys.stdin.readline(1024).strip()
    if not token:
        raise InvalidInput("no pairing token was given", remedy="write it to standard input")
    claim = make_claim(token, parsed.node_id, NodeIdentity.load_or_create(identity_file))
    body = {
        "token_id": claim.token_id,
        "node_id": claim.node_id,
        "public_key": claim.public_key.hex(),
        "proof": claim.proof.hex(),
        "signature": claim.signature.hex(),
    }
    answer = _post(f"{parsed.dashboard.rstrip('/')}/v1/network/nodes/register/redeem", body)
    console.say(f"{parsed.node_id} is paired as {answer.get('alias')}")
    if parsed.json:
        console.result(answer)
    return 0


def _post(url: str, body: dict[str, str]) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError("--dashboard is an http or https URL")
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PAIR_TIMEOUT_SECONDS) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            detail = _detail(error.read(4096))
        if error.code == 401:
            raise AuthenticationError(f"the dashboard refused: {detail}") from None
        raise InvalidInput(f"the dashboard refused: {detail}") from None
    except (OSError, ValueError):
        raise RequestFailed(FailureCode.UNAVAILABLE, "the dashboard does not answer", remedy="check --dashboard") from None
    return answer if isinstance(answer, dict) else {}


def _detail(body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])[:200]
    except (ValueError, KeyError, TypeError):
        return "no reason was given"
