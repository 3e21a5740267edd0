"""Settings of the daemons: flags over environment (``KAKEYA_*``) over a TOML file over defaults.

Service definitions bring defaults of their own (``--default NAME=VALUE``), which give way to the file: what a service is
installed with must not hide what its user writes there later.
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kakeya_zmq.option_values import ALL_ROLES, Option, parse_file_value, parse_value, refuse_lists_of_tables
from kakeya_zmq.options import DEFAULT_PORTS, OPTIONS, options_for
from kakeya_zmq.user_paths import home_folder, user_path
from wire.errors import ConfigError
from wire.files import read_guarded
from wire.limits import GIB, NAME_CHARACTERS_MAX
from wire.text import NODE_ID_CHARACTERS_MAX, is_node_id

CONFIG_FILE = "kakeya.toml"
CONFIG_BYTES_MAX = 1 << 20
"""Far more than all settings with comments."""
CONFIG_REMEDY = "check --config, or KAKEYA_CONFIG"


def kakeya_home(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of keys, state and logs: ``KAKEYA_HOME``, else ``~/.kakeya``."""
    value = (os.environ if environment is None else environment).get("KAKEYA_HOME", "")
    return user_path(value, "KAKEYA_HOME") if value else home_folder() / ".kakeya"


def find_config_file(given: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """The configuration file: the one of --config, else of ``KAKEYA_CONFIG``, else ``kakeya.toml`` in the home if there.

    One that is named and missing is found, too: reading it tells so, and no other file holds in its place.
    """
    given = given or (os.environ if environment is None else environment).get("KAKEYA_CONFIG", "")
    if given:
        return user_path(given, "the configuration file")
    usual = kakeya_home(environment) / CONFIG_FILE
    return usual if usual.exists() or usual.is_symlink() else None


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings of one daemon. Sizes in GiB, times in seconds; see OPTIONS for meanings."""

    role: str
    node_id: str
    bind: str
    bus_bind: str
    advertise: str
    endpoint: tuple[str, ...]
    peer: tuple[str, ...]
    cache_peer: tuple[str, ...]
    worker: tuple[str, ...]
    fleet_psk_file: str
    tenant_id: str
    tenant_key_file: str
    roster_file: str
    model: str
    model_id: str
    revision_label: str
    kv_policy: str
    sink: int
    window: int
    cache_block_tokens: int
    prefill_compute_chunk_tokens: int
    cache_gb: float
    adaptive_cache: bool
    cache_min_gb: float
    memory_reserve_gb: float
    bulk_ports: str
    network: str
    priority: int
    gossip_interval_s: float
    ttl_seconds: float
    cache_replication_factor: int
    enable_prefill_cache: bool
    prefill_policy: str
    remote_prefill_min_tokens: int
    prefill_min_savings_ratio: float
    primary_prefill_penalty_ms: float
    cache_lookup_timeout_s: float
    cache_fetch_timeout_s: float
    prefill_worker_timeout_s: float
    cache_max_import_gb: float
    import_grid: str
    local_prefill_tps: float
    worker_prefill_tps: float
    cache_link_mbps: float
    cache_compression: str
    lattice_q: int
    link_compression: str
    capacity: int
    session_idle_s: float
    max_connections: int
    peer_requests_per_s: float
    peer_lookups_per_s: float
    peer_publishes_per_s: float
    peer_jobs_per_s: float
    max_jobs: int
    max_jobs_per_node: int
    max_prompt_tokens: int
    blas_threads: int
    decode_worker: bool
    decode_worker_timeout_s: float
    decode_worker_startup_timeout_s: float
    assert_compatibility: tuple[str, ...]
    telemetry_interval_s: float
    memory_warning_gb: float
    memory_drain_gb: float
    memory_unhealthy_gb: float
    memory_poll_s: float
    decode_stall_s: float
    runtime_health_port: int
    drain_s: float
    ready_file: str
    log_level: str
    log_format: str
    log_max_mb: float

    @property
    def cache_bytes(self) -> int:
        return int(self.cache_gb * GIB)

    @property
    def roster_is_named(self) -> bool:
        """Whether somebody wrote where the roster is: another place than the usual one, where there need be none."""
        return self.roster_file != _usual_roster(self.fleet_psk_file)


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings and, for each, where the value came from: "flag", "environment", "file", "service default" or "default"."""

    settings: Settings
    origins: Mapping[str, str]


def resolve_settings(
    role: str,
    flags: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    host_name: Callable[[], str] | None = None,
    defaults: Iterable[str] = (),
) -> ResolvedSettings:
    """Merge all sources for one daemon.

    Args:
        role: primary, worker or cache.
        flags: option name to value; None means not given.
        environment: defaults to the process's.
        file: a TOML file; settings at top level apply to every role, a table named after the role to that role.
        host_name: for the default node id.
        defaults: NAME=VALUE, each in the place of a built-in default.

    Raises:
        ConfigError: an unknown key or a value that does not fit, naming where it came from and what would fit.
    """
    environment = os.environ if environment is None else environment
    from_file = read_config_file(file, role) if file else {}
    instead = _parse_defaults(role, defaults)
    values: dict[str, Any] = {"role": role}
    origins: dict[str, str] = {}
    for option in OPTIONS:
        value, origin = _pick(option, role, flags, environment, from_file, instead)
        values[option.name] = value
        origins[option.name] = origin
    home = kakeya_home(environment)
    values["fleet_psk_file"] = values["fleet_psk_file"] or str(home / "fleet.psk")
    beside = Path(values["fleet_psk_file"]).parent
    values["tenant_key_file"] = values["tenant_key_file"] or str(beside / "tenants" / f"{values['tenant_id']}.key")
    values["roster_file"] = values["roster_file"] or _usual_roster(values["fleet_psk_file"])
    values["bind"] = values["bind"] or f"127.0.0.1:{DEFAULT_PORTS[role]}"
    if not values["node_id"]:
        values["node_id"] = _default_node_id(role, (host_name or socket.gethostname)())
    if origins["cache_min_gb"] in ("default", "service default"):
        # Nobody asked for this floor: it gives way to a smaller store that somebody asked for.
        values["cache_min_gb"] = min(values["cache_min_gb"], values["cache_gb"])
    _check_names(values)
    _check_together(values)
    assert {f.name for f in fields(Settings)} == set(values)
    return ResolvedSettings(Settings(**values), origins)


def _usual_roster(psk_file: str) -> str:
    return str(Path(psk_file).parent / "fleet.toml")


def _default_node_id(role: str, host_name: str) -> str:
    """The role and the host's first name; hosts have names with characters that no node id may have."""
    first = "".join(c if _is_name_character(c) else "-" for c in host_name.split(".")[0])
    return f"{role}-{first}"[:NODE_ID_CHARACTERS_MAX]


def _is_name_character(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character in "-_.")


def _check_names(values: Mapping[str, Any]) -> None:
    for name in ("node_id", "tenant_id"):
        text = str(values[name])
        if not is_node_id(text):
            remedy = f"use letters, digits, '-', '_' and '.', at most {NODE_ID_CHARACTERS_MAX} characters"
            raise ConfigError(f"{name} {text!r} is not usable", remedy=remedy)
    for name in ("model_id", "revision_label"):
        if len(values[name]) > NAME_CHARACTERS_MAX or not str(values[name]).isprintable():
            raise ConfigError(f"{name} is not usable", remedy=f"at most {NAME_CHARACTERS_MAX} printable characters")


def _check_together(values: Mapping[str, Any]) -> None:
    if values["role"] == "primary" and values["prefill_policy"] == "remote-required" and not values["enable_prefill_cache"]:
        raise ConfigError(
            "prefill_policy remote-required needs the fleet, and the prefill cache is off",
            remedy="leave the policy out (KAKEYA_PREFILL_POLICY, prefill_policy), or add --enable-prefill-cache",
        )
    interval_s, ttl_s = values["gossip_interval_s"], values["ttl_seconds"]
    if ttl_s <= interval_s:
        text = f"ttl_seconds {ttl_s:g} is not longer than gossip_interval_s {interval_s:g}: nodes would come and go"
        raise ConfigError(text, remedy="a few intervals, for example ten")
    if values["adaptive_cache"] and values["cache_min_gb"] > values["cache_gb"]:
        text = f"cache_min_gb {values['cache_min_gb']:g} is larger than cache_gb {values['cache_gb']:g}"
        raise ConfigError(text, remedy="lower --cache-min-gb or raise --cache-gb")
    levels = [values[f"memory_{level}_gb"] for level in ("warning", "drain", "unhealthy")]
    if levels != sorted(levels):
        text = f"memory_warning_gb, memory_drain_gb and memory_unhealthy_gb are {levels[0]:g}, {levels[1]:g}, {levels[2]:g}"
        raise ConfigError(text, remedy="each at least as large as the one before")


def _parse_defaults(role: str, texts: Iterable[str]) -> dict[str, str]:
    names = [option.name for option in options_for(role)]
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not value:
            raise ConfigError(f"--default: {text[:80]!r} is not NAME=VALUE", remedy="for example --default cache_gb=8")
        if name not in names:
            raise _unknown_key(name, names, "value of --default")
        found[name] = value
    return found


def _pick(
    option: Option,
    role: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    from_file: Mapping[str, Any],
    defaults: Mapping[str, str],
) -> tuple[Any, str]:
    if role not in option.roles:
        return option.default, "default"
    given = flags.get(option.name)
    if given is not None and given != []:
        return parse_value(option, given, f"{option.flag}"), "flag"
    if environment.get(option.variable, "") != "":
        return parse_value(option, environment[option.variable], option.variable), "environment"
    if option.name in from_file:
        return parse_file_value(option, from_file[option.name], f"{option.name} in the configuration file"), "file"
    if option.name in defaults:
        return parse_value(option, defaults[option.name], f"--default {option.name}"), "service default"
    return option.default, "default"


def _read_text(path: Path) -> str:
    """The file's text. It says which keys and which roster count: nobody else may be able to change it.

    Raises:
        UnsafeFileError: others could change it.
        ConfigError: it is a link that leads nowhere.
        OSError: it cannot be read, is not a regular file, or larger than a configuration can be.
    """
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"the configuration file {path} is a link that leads nowhere", remedy="mend it, or remove it")
    data = read_guarded(path, CONFIG_BYTES_MAX, "the configuration file")
    return data.decode("utf-8-sig")  # some editors put a mark before the text


def read_config_file(path: Path, role: str) -> dict[str, Any]:
    """What the file says for a role, by setting; the values are not judged yet.

    Raises:
        UnsafeFileError: others could change it.
        ConfigError: it cannot be read, is no TOML, or has an unknown key.
    """
    try:
        document = tomllib.loads(_read_text(path))
    except RecursionError:
        raise ConfigError("the configuration file is nested too deeply", remedy="see docs/configuration.md") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}", remedy=CONFIG_REMEDY) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file is not valid TOML: {error}") from None
    except ValueError:  # Python's own limit for the digits of a number
        raise ConfigError("a number in the configuration file is too long", remedy="see docs/configuration.md") from None
    refuse_lists_of_tables(document)
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    plain = {name: value for name, value in document.items() if not isinstance(value, dict)}
    _check_keys(plain, {option.name for option in OPTIONS})
    for name, table in tables.items():
        if name not in ALL_ROLES:
            if any(option.name == name for option in OPTIONS):
                remedy = f"write {name} = ...; tables are for roles: {', '.join(f'[{role}]' for role in ALL_ROLES)}"
                raise ConfigError(f"{name} in the configuration file is a setting, and no table", remedy=remedy)
            raise _unknown_key(name, [*ALL_ROLES, *(option.name for option in OPTIONS)])
        _check_keys(table, {option.name for option in options_for(name)}, f"table [{name}] of the configuration file")
    return {**plain, **tables.get(role, {})}


def _check_keys(given: Iterable[str], known: Collection[str], where: str = "configuration file") -> None:
    for name in given:
        if name not in known:
            raise _unknown_key(name, known, where)


def _unknown_key(name: str, known: Collection[str], where: str = "configuration file") -> ConfigError:
    close = get_close_matches(name, list(known), n=1)
    remedy = f"did you mean {close[0]!r}?" if close else "see `kakeya --help` for the settings"
    return ConfigError(f"unknown setting {name!r} in the {where}", remedy=remedy)
