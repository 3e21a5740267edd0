"""A home without faults, for the tests that plant one and ask the doctor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deploy.doctor_rig import Doctor
from tests.proxy import free_port
from wire.keys import FleetKey, write_secret_file


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    for name in [name for name in os.environ if name.startswith("KAKEYA_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("KAKEYA_HOME", str(home))
    monkeypatch.setenv("KAKEYA_LAUNCH_AGENTS", str(tmp_path / "agents"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    # The usual ports may be taken by whatever else runs on this machine.
    monkeypatch.setenv("KAKEYA_DASHBOARD_BIND", f"127.0.0.1:{free_port()}")
    ports = {role: free_port() for role in ("primary", "worker", "cache")}
    lines = [f'[{role}]\nbind = "127.0.0.1:{port}"\ncache_gb = 0.5\n' for role, port in ports.items()]
    (home / "kakeya.toml").write_text("\n".join(lines))
    write_secret_file(home / "fleet.psk", FleetKey.generate())
    return Doctor(home, capsys)
