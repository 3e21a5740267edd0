"""`kakeya doctor`, run in the process of a test on a home of its own, and the services that are installed there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemons.command import main
from deploy.render_service import render
from tests.deploy.service_rig import DEPLOY


class Doctor:
    """The command, run in this process on a home of its own."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._capsys = capsys

    def findings(self, *arguments: str, quick: bool = True) -> list[dict[str, str]]:
        code = main(["doctor", "--json", *(["--quick"] if quick else []), *arguments])
        told = json.loads(self._capsys.readouterr().out.splitlines()[-1])
        found: list[dict[str, str]] = told["findings"]
        assert code == (1 if any(row["level"] == "problem" for row in found) else 0)
        return found

    def one(self, words: str, *arguments: str, quick: bool = True) -> dict[str, str]:
        """The finding whose text has these words; it must have a remedy."""
        found = self.findings(*arguments, quick=quick)
        matching = [row for row in found if words in row["text"]]
        assert matching, found
        assert matching[0]["remedy"]
        return matching[0]

    def about(self, subject: str) -> list[dict[str, str]]:
        """What is not in order with a subject."""
        return [row for row in self.findings() if row["subject"] == subject and row["level"] != "ok"]

    @property
    def agents(self) -> Path:
        return self.home.parent / "agents"

    @property
    def units(self) -> Path:
        return self.home.parent / "config" / "systemd" / "user"

    @property
    def places(self) -> dict[str, str]:
        """For a command that runs in another process."""
        return {"KAKEYA_LAUNCH_AGENTS": str(self.agents), "XDG_CONFIG_HOME": str(self.home.parent / "config")}

    def install(self, name: str, **variables: str) -> Path:
        """Put a service's definition where it belongs, as the install script would."""
        template = DEPLOY / ("launchd" if name.startswith("ai.") else "systemd") / name
        folder = self.agents if name.startswith("ai.") else self.units
        folder.mkdir(parents=True, exist_ok=True)
        program = self.program()
        given = {
            "HOME": str(self.home.parent),
            "KAKEYA_HOME": str(self.home),
            "KAKEYA_RUNTIME_COMMAND": str(program),
            "KAKEYA_WORKER_COMMAND": str(program),
            "KAKEYA_NETWORK_COMMAND": str(program),
            "KAKEYA_RUNTIME_MODEL": str(self.home / "model"),
            "KAKEYA_WORKER_NODE_ID": "w",
            "KAKEYA_WORKER_MODEL": str(self.home / "model"),
            "KAKEYA_WORKER_ADVERTISE": "192.0.2.21:53051",
            "KAKEYA_CACHE_NODE_ID": "c",
            "KAKEYA_CACHE_ADVERTISE": "192.0.2.22:52051",
        }
        (folder / name).write_bytes(render(template, {**given, **variables}))
        return folder / name

    def program(self) -> Path:
        """A virtual environment's command, in a folder with a space."""
        program = self.home.parent / "opt" / "ka keya" / "bin" / "kakeya"
        if not program.exists():
            program.parent.mkdir(parents=True)
            (program.parent / "python").touch()
            program.write_text(f"#!/bin/sh\n'''exec' \"{program.parent}/python\" \"$0\" \"$@\"\n' '''\n")
            program.chmod(0o755)
        return program
