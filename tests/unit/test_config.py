"""Settings: which source wins, what is refused with which advice, and that every option can be given in every way."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons.command import main
from daemons.config_command import sample_text
from daemons.environment_names import KNOWN_NAMES, unknown_variables
from kakeya_zmq.config import ResolvedSettings, find_config_file, kakeya_home, resolve_settings
from kakeya_zmq.option_values import ALL_ROLES, Option, parse_value
from kakeya_zmq.options import OPTIONS, options_for
from wire.cards import CARD_TTL_MS_MAX
from wire.errors import ConfigError
from wire.limits import GIB

ORDERED = ("KAKEYA_MEMORY_WARNING_GB", "KAKEYA_MEMORY_DRAIN_GB", "KAKEYA_MEMORY_UNHEALTHY_GB")
"""Each must be at least as large as the one before."""

PROJECT = Path(__file__).resolve().parents[2]

each_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


def resolve(
    role: str = "primary",
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> ResolvedSettings:
    return resolve_settings(role, flags or {}, environment=environment or {}, file=file, host_name=lambda: "box.local")


def written(folder: Path, text: str) -> Path:
    path = folder / "kakeya.toml"
    path.write_text(text)
    return path


# --- who wins ----------------------------------------------------------------------------------------------------------


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "capacity = 10\n")
    environment = {"KAKEYA_CAPACITY": "20"}
    found = [
        resolve(flags={"capacity": "30"}, environment=environment, file=file),
        resolve(flags={"capacity": None}, environment=environment, file=file),
        resolve(file=file),
        resolve(),
    ]
    assert [(each.settings.capacity, each.origins["capacity"]) for each in found] == [
        (30, "flag"),
        (20, "environment"),
        (10, "file"),
        (4, "default"),
    ]


def test_a_roles_table_wins_over_the_top_level_and_other_tables_do_not_matter(tmp_path: Path) -> None:
    file = written(tmp_path, "cache_gb = 1.0\n[worker]\ncache_gb = 2.0\n[cache]\ncache_gb = 3.0\n")
    assert [resolve(role, file=file).settings.cache_gb for role in ALL_ROLES] == [1.0, 2.0, 3.0]


def test_a_default_of_a_service_gives_way_to_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "capacity = 10\n")
    defaults = ("capacity=1", "enable-prefill-cache=1", "cache_gb=8")
    found = resolve_settings("primary", {}, environment={"KAKEYA_CACHE_GB": "9"}, file=file, defaults=defaults)
    names = ("capacity", "enable_prefill_cache", "cache_gb", "drain_s")
    assert [(getattr(found.settings, name), found.origins[name]) for name in names] == [
        (10, "file"),
        (True, "service default"),
        (9.0, "environment"),
        (20.0, "default"),
    ]


@pytest.mark.parametrize("text", ["capacity", "capacity=", "capacty=1", "capacity=many", "max_jobs=1"])
def test_a_default_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        resolve_settings("primary", {}, environment={}, defaults=(text,))


# --- names of variables that mean nothing -------------------------------------------------------------------------------


def test_a_misspelt_variable_is_named_with_what_was_meant() -> None:
    environment = {
        "KAKEYA_CACHE_BG": "1",
        "KAKEYA_WORKER_NODEID": "n",
        "KAKEYA_XYZZY": "1",
        "KAKEYA_EMPTY": "",
        "KAKEYA_CACHE_GB": "1",
        "KAKEYA_WORKER_NODE_ID": "n",
        "PATH": "/bin",
    }
    assert [str(each) for each in unknown_variables(environment)] == [
        "KAKEYA_CACHE_BG is not known and has no effect: did you mean KAKEYA_CACHE_GB?",
        "KAKEYA_WORKER_NODEID is not known and has no effect: did you mean KAKEYA_WORKER_NODE_ID?",
        "KAKEYA_XYZZY is not known and has no effect",
    ]


def test_every_variable_that_the_program_reads_is_a_known_one() -> None:
    folders = [PROJECT / name for name in ("daemons", "dashboard", "kakeya_zmq", "wire")]
    texts = [file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"\bKAKEYA_[A-Z0-9_]*[A-Z0-9]\b", text)}
    assert {name for name in named if not name.endswith("_")} - KNOWN_NAMES <= {"KAKEYA_CACHE", "KAKEYA_NETWORK"}


def test_an_empty_variable_and_an_empty_list_are_not_given(tmp_path: Path) -> None:
    file = written(tmp_path, 'peer = ["a:1"]\ncapacity = 7\n')
    found = resolve(flags={"peer": []}, environment={"KAKEYA_PEER": "", "KAKEYA_CAPACITY": ""}, file=file)
    assert (found.settings.peer, found.settings.capacity) == (("a:1",), 7)


def test_what_is_not_a_roles_business_does_not_reach_it() -> None:
    found = resolve("cache", {"capacity": "9"}, {"KAKEYA_CAPACITY": "nonsense"})
    assert (found.settings.capacity, found.origins["capacity"]) == (4, "default")


@each_option
def test_every_option_is_known_by_flag_and_variable(option: Option) -> None:
    assert option.flag == "--" + option.name.replace("_", "-")
    assert option.variable == "KAKEYA_" + option.name.upper()
    assert option.help
    value = (
        option.choices[-1]
        if option.choices
        else {"list": "x:1,y:2", "integer": None, "number": None, "switch": "yes"}.get(option.kind, "text")
    )
    value = str(option.maximum if option.kind == "number" else int(option.maximum or 0)) if value is None else value
    expected = parse_value(option, value, "here")
    for role in option.roles:
        found = resolve(
            role,
            environment={option.variable: value, "KAKEYA_TTL_SECONDS": "3600", "KAKEYA_GOSSIP_INTERVAL_S": "1"}
            | {name: value for name in ORDERED if option.name.startswith("memory_") and option.name.endswith("_gb")}
            | {option.variable: value if option.name != "gossip_interval_s" else "1"},
        )
        if option.name != "gossip_interval_s":
            assert getattr(found.settings, option.name) == expected
        assert found.origins[option.name] == "environment"


@each_option
def test_every_default_fits_its_own_bounds(option: Option) -> None:
    assert set(option.roles) <= set(ALL_ROLES)
    if option.kind in ("integer", "number"):
        assert option.minimum is not None
        assert option.maximum is not None
        assert option.minimum <= option.default <= option.maximum
        assert isinstance(option.default, int if option.kind == "integer" else float)
    elif option.kind == "choice":
        assert option.default in option.choices


def test_names_are_unique() -> None:
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.kind in ("integer", "number")], ids=lambda option: option.name)
def test_numbers_outside_their_bounds_are_refused_with_the_bounds(option: Option) -> None:
    assert option.minimum is not None
    assert option.maximum is not None
    for value in (option.minimum - 1, option.maximum * 2 + 1):
        with pytest.raises(ConfigError) as caught:
            parse_value(option, str(int(value) if option.kind == "integer" else value), option.flag)
        assert option.flag in str(caught.value)
        assert f"{option.minimum:g} to {option.maximum:g}" in str(caught.value)


@pytest.mark.parametrize("value", ["", "x", "1.5", "nan", "inf", "1e3", True, [1], "0x10"])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="a whole number from 1 to 4096"):
        resolve(flags={"capacity": value})


@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "-inf", True])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="a number"):
        resolve(flags={"cache_gb": value})


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("peer = 5", "a list of texts"),
        ("peer = [1]", "a text in quotes"),
        ("model = ['a']", "a text in quotes"),
        ("tenant_id = 5", 'tenant_id in the configuration file is 5, a number (a text in quotes: tenant_id = "5")'),
        ("model = 1.5", 'a text in quotes: model = "1.5"'),
        ("tenant_id = true", "tenant_id in the configuration file is true (a text in quotes)"),
        (
            'cache_gb = "3"',
            "cache_gb in the configuration file is '3', a text (a number from 0.001 to 4096, without quotes: cache_gb = 3.0",
        ),
        ('[primary]\ncapacity = "3"', "is '3', a text (a whole number from 1 to 4096, without quotes: capacity = 3)"),
        ('capacity = "many"', "is 'many', a text (a whole number from 1 to 4096, without quotes)"),
        ('capacity = "5000"', "is '5000', a text (a whole number from 1 to 4096, without quotes)"),
        ("capacity = true", "capacity in the configuration file is true (a whole number from 1 to 4096)"),
        ("cache_gb = false", "cache_gb in the configuration file is false (a number from"),
        ("capacity = 3.5", "capacity in the configuration file is 3.5 (a whole number from 1 to 4096)"),
        ("cache_gb = nan", "cache_gb in the configuration file is nan (a number from"),
        ("network = 5", "network in the configuration file is 5 (one of: "),
        ("kv_policy = 'bounded'", "one of: native, sink-window"),
        ("capcity = 5", "did you mean 'capacity'"),
        ("zzz = 5", "kakeya --help"),
        ("[wrker]\ncapacity = 5", "did you mean 'worker'"),
        ("[worker]\ncapacity = 5", "unknown setting 'capacity' in the table [worker]"),
        ("[cache]\ncache_gbb = 5", "did you mean 'cache_gb'"),
        ("capacity = ", "not valid TOML"),
        ("ttl_seconds = 5.0", "not longer than gossip_interval_s"),
        (
            "[[worker]]\ncache_gb = 5",
            "[[worker]] in the configuration file is a list of tables (a role has one table: write [w",
        ),
        (
            "[[cache_peer]]\naddress = 'a:1'",
            "[[cache_peer]] in the configuration file is a list of tables (a list of texts)",
        ),
        (
            "model = '~nobody-here/m'",
            "model in the configuration file is '~nobody-here/m', and there is no user 'nobody-here'",
        ),
        ("ready_file = '~nobody-here/r'", "ready_file in the configuration file is '~nobody-here/r'"),
    ],
)
def test_a_wrong_file_gets_one_line_of_advice(tmp_path: Path, text: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(file=written(tmp_path, text))
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_is_a_text_on_a_command_line_and_in_the_environment() -> None:
    """Only a file can tell them apart."""
    assert resolve(flags={"cache_gb": "3"}, environment={"KAKEYA_CAPACITY": "7"}).settings.cache_gb == 3
    with pytest.raises(ConfigError, match="a number from"):
        resolve(flags={"cache_gb": "'3'"})


def test_a_missing_file_and_a_file_of_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check --config"):
        resolve(file=tmp_path / "absent.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve(file=binary)


@pytest.mark.parametrize("name", [".", "..", "a/b", "a b", "ä", "", "x" * 101, ".hidden", "a\n"])
@pytest.mark.parametrize("key", ["node_id", "tenant_id"])
def test_ids_must_be_usable_as_folder_names(key: str, name: str) -> None:
    if key == "node_id" and name == "":
        return  # not named: the default is taken
    with pytest.raises(ConfigError, match=key):
        resolve(flags={key: name})


def test_a_model_id_must_fit_on_a_card() -> None:
    with pytest.raises(ConfigError, match="model_id"):
        resolve(flags={"model_id": "m" * 129})


def test_the_longest_life_of_a_node_fits_on_its_card() -> None:
    settings = resolve(flags={"ttl_seconds": "3600"}).settings
    assert int(settings.ttl_seconds * 1000) <= CARD_TTL_MS_MAX
    with pytest.raises(ConfigError):
        resolve(flags={"ttl_seconds": "3601"})


def test_levels_of_memory_must_be_in_order() -> None:
    with pytest.raises(ConfigError, match="18, 10, 21"):
        resolve(flags={"memory_drain_gb": "10"})
    assert resolve(flags={"memory_drain_gb": "18"}).settings.memory_drain_gb == 18


def test_the_smallest_store_is_no_larger_than_the_largest() -> None:
    wanted = {"adaptive_cache": "1", "cache_gb": "0.5"}
    with pytest.raises(ConfigError, match=r"cache_min_gb 1 is larger than cache_gb 0\.5"):
        resolve(flags={**wanted, "cache_min_gb": "1"})
    assert resolve(flags={**wanted, "cache_min_gb": "0.5"}).settings.cache_min_gb == 0.5
    assert resolve(flags={"cache_gb": "0.5", "cache_min_gb": "1"}).settings.cache_min_gb == 1, "of no effect"


@pytest.mark.parametrize("defaults", [("cache_min_gb=1",), ()])
def test_a_smallest_store_that_nobody_asked_for_gives_way(defaults: tuple[str, ...]) -> None:
    flags = {"adaptive_cache": "1", "cache_gb": "0.125"}
    found = resolve_settings("worker", flags, environment={}, defaults=defaults)
    assert found.settings.cache_min_gb == 0.125
    larger = resolve_settings("worker", {"adaptive_cache": "1", "cache_gb": "2"}, environment={}, defaults=defaults)
    assert larger.settings.cache_min_gb == (1 if defaults else 0.25)


def test_a_roster_in_the_usual_place_need_not_be_named() -> None:
    assert not resolve(flags={"fleet_psk_file": "/keys/fleet.psk"}).settings.roster_is_named
    named = {"fleet_psk_file": "/keys/fleet.psk", "roster_file": "/keys/flet.toml"}
    assert resolve(flags=named).settings.roster_is_named


# --- the usual file, the sample, and what is told ----------------------------------------------------------------------


def test_the_file_under_the_home_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    environment = {"KAKEYA_HOME": str(tmp_path)}
    assert find_config_file("", environment) is None
    usual = written(tmp_path, "capacity = 9\n")
    assert find_config_file("", environment) == usual
    assert find_config_file("/elsewhere.toml", environment) == Path("/elsewhere.toml")
    assert resolve(file=find_config_file("", environment)).settings.capacity == 9


def test_the_file_of_the_environment_is_taken_unless_a_flag_names_another(tmp_path: Path) -> None:
    written(tmp_path, "capacity = 9\n")
    environment = {"KAKEYA_HOME": str(tmp_path), "KAKEYA_CONFIG": "~/own.toml"}
    assert find_config_file("", environment) == Path.home() / "own.toml"
    assert find_config_file("/elsewhere.toml", environment) == Path("/elsewhere.toml")
    assert find_config_file("", {**environment, "KAKEYA_CONFIG": ""}) == tmp_path / "kakeya.toml"


def test_config_show_names_the_file_of_the_environment_and_its_absence_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("KAKEYA_")]:
        monkeypatch.delenv(name)
    written(tmp_path, "capacity = 9\n")
    own = tmp_path / "own.toml"
    own.write_text("capacity = 10\n", encoding="utf-8")
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    monkeypatch.setenv("KAKEYA_CONFIG", str(own))
    assert main(["config", "show", "--role", "primary", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["file"] == str(own)
    assert told["roles"]["primary"]["capacity"] == {"value": 10, "from": "file"}
    assert told["unknown_variables"] == {}
    own.unlink()
    assert main(["config", "show"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the configuration file {own} cannot be read" in line
    assert "KAKEYA_CONFIG" in line


@pytest.mark.parametrize("role", ALL_ROLES)
def test_a_list_of_tables_is_refused_by_every_role(tmp_path: Path, role: str) -> None:
    with pytest.raises(ConfigError, match=r"\[\[worker\]\] in the configuration file"):
        resolve(role, file=written(tmp_path, "[[worker]]\ncache_gb = 5\n"))


def test_a_link_that_leads_nowhere_is_no_missing_file(tmp_path: Path) -> None:
    """Settings that somebody has written must not vanish without a word, because a disk is not there."""
    link = tmp_path / "kakeya.toml"
    link.symlink_to(tmp_path / "elsewhere.toml")
    assert find_config_file("", {"KAKEYA_HOME": str(tmp_path)}) == link
    with pytest.raises(ConfigError, match=f"{link} is a link that leads nowhere"):
        resolve(file=link)
    (tmp_path / "elsewhere.toml").write_text("capacity = 9\n", encoding="utf-8")
    assert resolve(file=link).settings.capacity == 9


def test_a_mark_before_the_text_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "kakeya.toml"
    file.write_text("capacity = 9\n", encoding="utf-8-sig")
    assert resolve(file=file).settings.capacity == 9


def test_a_setting_that_is_written_as_a_table_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_gb in the configuration file is a setting, and no table") as caught:
        resolve(file=written(tmp_path, "[cache_gb]\nvalue = 4\n"))
    assert caught.value.remedy.startswith("write cache_gb = ...")


SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "kakeya.sample.toml"


def test_the_sample_is_the_one_that_the_command_prints() -> None:
    assert SAMPLE.read_text(encoding="utf-8") == sample_text(), "run: kakeya config sample > deploy/kakeya.sample.toml"


def test_the_sample_has_every_option_with_its_default(tmp_path: Path) -> None:
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    names = {option.name for option in OPTIONS}
    settings = [line.removeprefix("# ") for line in lines if line.removeprefix("# ").partition(" = ")[0] in names]
    document = tomllib.loads("\n".join(settings))
    assert set(document) == names
    file = written(tmp_path, "\n".join(settings))
    for role in ALL_ROLES:
        found, plain = resolve(role, file=file), resolve(role)
        assert found.settings == plain.settings
        assert {found.origins[option.name] for option in options_for(role)} == {"file"}


def test_config_show_tells_values_and_where_they_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "cache_gb = 2.0\n[worker]\nmax_jobs = 7\n")
    for name in [name for name in os.environ if name.startswith("KAKEYA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    monkeypatch.setenv("KAKEYA_DRAIN_S", "3")
    assert main(["config", "show", "--role", "worker", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = told["roles"]["worker"]
    assert set(rows) == {option.name for option in options_for("worker")}
    assert [rows[name] for name in ("cache_gb", "max_jobs", "drain_s", "sink")] == [
        {"value": 2.0, "from": "file"},
        {"value": 7, "from": "file"},
        {"value": 3.0, "from": "environment"},
        {"value": 4, "from": "default"},
    ]
    written(tmp_path, "cache_bg = 2.0\n")
    assert main(["config", "show"]) == 2
    assert "did you mean 'cache_gb'" in capsys.readouterr().err


# --- values ----------------------------------------------------------------------------------------------------------


def test_lists_come_from_repeated_flags_commas_and_files(tmp_path: Path) -> None:
    wanted = ("a:1", "b:2")
    assert resolve(flags={"peer": ["a:1", "b:2"]}).settings.peer == wanted
    assert resolve(flags={"peer": ["a:1, b:2"]}).settings.peer == wanted
    assert resolve(environment={"KAKEYA_PEER": " a:1 ,, b:2"}).settings.peer == wanted
    assert resolve(file=written(tmp_path, 'peer = ["a:1", "b:2"]')).settings.peer == wanted


def test_files_follow_the_home_folder_and_the_psk() -> None:
    environment = {"KAKEYA_HOME": "/tmp/home"}
    assert kakeya_home(environment) == Path("/tmp/home")
    assert kakeya_home({"KAKEYA_HOME": ""}) == Path.home() / ".kakeya"
    settings = resolve(environment=environment).settings
    assert settings.fleet_psk_file == "/tmp/home/fleet.psk"
    assert settings.tenant_key_file == "/tmp/home/tenants/default.key"
    settings = resolve(environment=environment, flags={"fleet_psk_file": "~/x/y.psk", "tenant_id": "t"}).settings
    assert settings.fleet_psk_file == str(Path.home() / "x/y.psk")
    assert settings.tenant_key_file == str(Path.home() / "x/tenants/t.key")


def test_each_role_has_its_own_address_and_name() -> None:
    found = [resolve(role).settings for role in ALL_ROLES]
    assert len({settings.bind for settings in found}) == 3
    assert [settings.node_id for settings in found] == ["primary-box", "worker-box", "cache-box"]
    assert found[0].cache_bytes == 4 * GIB


@given(host=st.text(max_size=300))
def test_whatever_the_host_is_called_the_default_name_is_usable(host: str) -> None:
    settings = resolve_settings("worker", {}, environment={}, host_name=lambda: host).settings
    assert settings.node_id.startswith("worker-")


@pytest.mark.parametrize("role", ALL_ROLES)
def test_a_role_is_offered_exactly_its_options(role: str) -> None:
    offered = options_for(role)
    assert offered == tuple(option for option in OPTIONS if role in option.roles)
    assert "prefill_policy" in {o.name for o in options_for("primary")} - {o.name for o in options_for("cache")}


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("off", False), (True, True), ("no", False)])
def test_switches(text: Any, value: bool) -> None:
    assert parse_value(Option("s", "switch", False, "help"), text, "here") is value
    with pytest.raises(ConfigError, match="1 or 0"):
        parse_value(Option("s", "switch", False, "help"), "maybe", "here")


def test_a_policy_that_needs_the_fleet_is_left_out_where_there_is_none() -> None:
    """To roll back; sharing is on or off by decision, so the refusal does not only tell to turn it on."""
    with pytest.raises(ConfigError, match="the prefill cache is off") as caught:
        resolve_settings("primary", {"prefill_policy": "remote-required"}, environment={}, host_name=lambda: "box")
    assert caught.value.remedy.startswith("leave the policy out")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device here")
def test_a_device_is_no_configuration_file() -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        resolve(file=Path("/dev/zero"))


def test_a_huge_or_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        resolve(file=written(tmp_path, "#" * (1 << 20) + "\n"))
    with pytest.raises(ConfigError, match="nested too deeply"):
        resolve(file=written(tmp_path, "cache_gb = " + "[" * 5000))


@pytest.mark.parametrize("value", ["9" * 6000, "0x" + "f" * 6000, "9" * 4000, "[0x" + "f" * 6000 + "]"])
@pytest.mark.parametrize("name", ["capacity", "cache_gb", "adaptive_cache", "node_id", "peer", "network"])
def test_a_number_that_is_far_too_long_is_one_short_line(tmp_path: Path, name: str, value: str) -> None:
    file = tmp_path / "kakeya.toml"
    file.write_text(f"{name} = {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve_settings("primary", {}, environment={}, file=file, host_name=lambda: "box")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300
    environment = {f"KAKEYA_{name.upper()}": value} if name in ("capacity", "cache_gb", "adaptive_cache") else {}
    if environment:
        with pytest.raises(ConfigError) as caught:
            resolve_settings("primary", {}, environment=environment, host_name=lambda: "box")
        assert len(str(caught.value)) < 300
