"""Keys and the folder they lie in: there, usable, and closed to others. Their content is never shown."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from daemons.doctor.finding import Finding, ok, problem, warning
from daemons.doctor.site import Site
from daemons.keys_command import key_states
from wire.errors import SecretFileError
from wire.keys import TelemetryKey, read_secret_file


def examine_keys(site: Site) -> Iterator[Finding]:
    if not site.psk_file.exists():
        remedy = "run `kakeya key new` on one machine, and copy the file to all others (scp -p)"
        yield problem("keys", "there is no fleet key (fleet.psk) here", remedy)
        return
    for row in key_states(site.psk_file):
        name, state = str(row["key"]), str(row["state"])
        if row["usable"]:
            yield ok("keys", f"{name}: {state}")
            continue
        message, _, remedy = state.removesuffix(")").partition(" (")
        yield problem("keys", message, remedy or "copy it again from a machine where it works (scp -p)")
    yield from _others(site)
    mode = stat.S_IMODE(site.home.stat().st_mode)
    if mode & 0o022:
        yield warning("keys", "others may write to the folder of the keys", f"chmod go-w {site.home}")


def _others(site: Site) -> Iterator[Finding]:
    api_key = site.home / "network_api_key"
    if api_key.exists():
        try:
            read_secret_file(api_key, minimum_bytes=1, what="API key")
            yield ok("keys", "API key of the dashboard: ready")
        except SecretFileError as error:
            yield problem("keys", error.message, error.remedy)
    telemetry = site.home / "telemetry.key"
    if telemetry.exists():
        try:
            TelemetryKey.load(telemetry)
            yield ok("keys", "telemetry-read key: ready")
        except SecretFileError as error:
            yield problem("keys", error.message, error.remedy or "run `kakeya key telemetry`")
    settings = site.settings.get("worker")
    if settings is not None and not (site.psk_file.parent / "tenants" / f"{settings.tenant_id}.key").exists():
        remedy = "copy it from the primary (scp -p); a primary makes it at its first start"
        yield warning("keys", f"there is no key of the tenant {settings.tenant_id} here", remedy)
