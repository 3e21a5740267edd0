"""A home with keys, a model folder and a stand-in for launchctl, for the tests of install scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from wire.keys import FleetKey, write_secret_file

PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy"
TEMPLATES = sorted((DEPLOY / "launchd").glob("*.plist"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@dataclass(frozen=True, slots=True)
class Home:
    """``home``: stands for the user's home folder; ``environment``: what the scripts see."""

    home: Path
    environment: dict[str, str]

    @property
    def agents(self) -> Path:
        return self.home / "Library" / "LaunchAgents"

    @property
    def calls(self) -> list[str]:
        """What launchctl was called with so far."""
        path = self.home / "launchd" / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def forget_calls(self) -> None:
        (self.home / "launchd" / "calls").unlink(missing_ok=True)

    def plan(self, name: str, count: int) -> None:
        """Let the stand-in misbehave ``count`` times: refuse-bootstrap or slow-bootout."""
        (self.home / "launchd" / name).write_text(str(count), encoding="utf-8")

    def run(
        self, script: str, *arguments: str, folder: Path | None = None, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of deploy/, in ``folder``; a changed variable that is empty is taken away."""
        environment = {name: value for name, value in {**self.environment, **changes}.items() if value}
        return subprocess.run(
            ["bash", str(DEPLOY / script), *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            check=False,
        )


def make_home(folder: Path) -> Home:
    home = folder / "a home & more"
    kakeya = home / ".kakeya"
    kakeya.mkdir(parents=True, mode=0o700)
    write_secret_file(kakeya / "fleet.psk", FleetKey.generate())
    write_secret_file(kakeya / "network_api_key", b"0123456789abcdef0123456789abcdef")
    model = home / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}), encoding="utf-8")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    programs = home / "bin"
    programs.mkdir()
    (programs / "launchctl").symlink_to(Path(__file__).with_name("launchctl.sh"))
    (home / "launchd").mkdir()
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(home),
        "FAKE_LAUNCHD": str(home / "launchd"),
        "KAKEYA_INSTALL_WAIT_S": "0.01",
        "KAKEYA_INSTALL_RETRY_S": "0.01",
        "KAKEYA_WORKER_PYTHON": sys.executable,
        "KAKEYA_WORKER_MODEL": str(model),
        "KAKEYA_WORKER_NODE_ID": "prefill-mini-1",
        "KAKEYA_WORKER_ADVERTISE": "192.0.2.21:53051",
        "KAKEYA_RUNTIME_PYTHON": sys.executable,
        "KAKEYA_RUNTIME_MODEL": str(model),
        "KAKEYA_CACHE_NODE_ID": "cache-mini-1",
        "KAKEYA_CACHE_ADVERTISE": "192.0.2.22:52051",
        "VENV": str(Path(sys.executable).parents[1]),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
    }
    return Home(home, environment)
