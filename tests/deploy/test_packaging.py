"""The wheel and the source archive build, and the wheel alone gives a working command, without MLX."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya_zmq import __version__
from tests.fleet_rig import KEPT_PROCESSES, PROJECT, clean_environment, wait_until

pytestmark = pytest.mark.slow
ROOMS = ("wire", "kakeya_zmq", "daemons", "dashboard")
FILES = (
    "MANIFEST.in",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "requirements-kakeyalattice.txt",
    ".gitignore",
)
BESIDE = (".ci", "deploy", "docs", "tests")
"""What no wheel holds, and the source archive does."""
INSTALL_S = 280


def _run(*command: str, cwd: Path, home: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**clean_environment(), "KAKEYA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built in a copy: a build leaves things behind."""
    work = tmp_path_factory.mktemp("build")
    source, out = work / "source", work / "out"
    source.mkdir()
    for room in (*ROOMS, *BESIDE):
        shutil.copytree(PROJECT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy2(PROJECT / name, source / name)
    out.mkdir()
    builder = work / "builder" / "bin" / "python"
    _run(sys.executable, "-m", "venv", str(work / "builder"), cwd=work, home=work)
    needed = ("pip", "install", "--quiet", "--disable-pip-version-check", "setuptools>=68", "wheel")
    _run(str(builder), "-m", *needed, cwd=work, home=work)
    for kind in ("sdist", "wheel"):
        program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
        _run(str(builder), "-c", program, str(out), cwd=source, home=work)
    return out


def _wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def test_both_archives_hold_every_room_and_the_page(built: Path) -> None:
    project = built.parent / "source"  # what was built: others may be at work in the project
    names = set(zipfile.ZipFile(_wheel(built)).namelist())
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        source = {name.partition("/")[2] for name in opened.getnames()}
    for room in ROOMS:
        wanted = {
            str(path.relative_to(project))
            for path in (project / room).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert {name for name in wanted if name.endswith(".py")} <= names
        assert {name for name in wanted if name.endswith(".py")} <= source
    page = {str(path.relative_to(project)) for path in (project / "dashboard" / "page").rglob("*") if path.is_file()}
    assert page <= names
    assert not any(name.startswith(("tests/", "docs/", "deploy/")) for name in names)


def test_the_source_archive_is_the_whole_project(built: Path, tmp_path: Path) -> None:
    """README.md's commands and links work from an unpacked one."""
    project = built.parent / "source"
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    wanted = {
        path.relative_to(project) for room in (*ROOMS, *BESIDE) for path in (project / room).rglob("*") if path.is_file()
    }
    wanted |= {Path(name) for name in FILES}
    there = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    assert wanted - there == set()
    made = {path for path in there - wanted if "egg-info" not in path.parts[0]}
    assert made == {Path("PKG-INFO")}
    for linked in re.findall(r"\]\(([^)#:]+)[^):]*\)", (source / "README.md").read_text(encoding="utf-8")):
        assert (source / linked).exists(), linked
    for script in re.findall(r"^bash (deploy/\S+\.sh)", (source / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert (source / script).exists(), script
    _run("bash", "deploy/install_systemd.sh", "--help", cwd=source, home=tmp_path)


def test_extras_and_platform_markers(built: Path) -> None:
    with zipfile.ZipFile(_wheel(built)) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("METADATA")]
        metadata = opened.read(name).decode("utf-8")
    assert set(re.findall(r"^Provides-Extra: (\w+)$", metadata, flags=re.MULTILINE)) >= {"mlx", "demo", "bench", "test"}
    mlx = [line for line in metadata.splitlines() if re.match(r"Requires-Dist: mlx\b(?!-)", line)]
    assert sorted(re.findall(r'sys_platform == "(\w+)"', " ".join(mlx))) == ["darwin", "linux"]
    assert all("extra ==" in line for line in mlx)


@pytest.fixture(scope="module")
def venv(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("venv")
    _run(sys.executable, "-m", "venv", str(folder), cwd=built, home=built)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, str(_wheel(built)), cwd=built, home=built)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    return made


class Daemon:
    """A daemon of the installed command."""

    def __init__(self, venv: Path, home: Path, *arguments: str) -> None:
        self.ready = home / "ready"
        self.log = home / "daemon.log"
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [str(venv / "bin" / "kakeya"), *arguments, "--ready-file", str(self.ready)],
                cwd=home,
                env={**clean_environment(), "KAKEYA_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def address(self) -> str:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
            return self.ready.exists()

        wait_until(ready, "it serves", 60)
        return str(json.loads(self.ready.read_text(encoding="utf-8"))["address"])

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@pytest.fixture
def daemon(venv: Path, home: Path, request: pytest.FixtureRequest) -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for each in started:
        each.stop()
        request.session.stash.setdefault(KEPT_PROCESSES, set()).discard(each.process.pid)


def test_the_command_works_without_mlx(venv: Path, home: Path, daemon: list[Daemon]) -> None:
    kakeya = str(venv / "bin" / "kakeya")
    assert _run(kakeya, "--version", cwd=home, home=home).stdout.strip() == f"kakeya-zmq {__version__}"
    assert _run(str(venv / "bin" / "python"), "-c", "import mlx", cwd=home, home=home, code=1)
    _run(kakeya, "key", "new", cwd=home, home=home)
    cache = Daemon(venv, home, "cache", "--bind", "127.0.0.1:0")
    daemon.append(cache)
    told = _run(kakeya, "status", "--json", "--address", cache.address(), cwd=home, home=home)
    assert json.loads(told.stdout.splitlines()[-1])["nodes"][0]["sections"]["node"]["state"] == "serving"
    _run(kakeya, "config", "show", "--role", "cache", cwd=home, home=home)
    assert cache.stop() == 0


def test_the_dashboard_works_without_mlx(venv: Path, home: Path, daemon: list[Daemon]) -> None:
    _run(str(venv / "bin" / "kakeya"), "key", "new", cwd=home, home=home)
    dashboard = Daemon(venv, home, "dashboard", "--bind", "127.0.0.1:0")
    daemon.append(dashboard)
    address = dashboard.address()
    for path in ("/healthz", "/"):
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            assert answer.status == 200
    assert dashboard.stop() == 0


def test_a_primary_without_mlx_says_what_is_missing(venv: Path, home: Path) -> None:
    kakeya = str(venv / "bin" / "kakeya")
    _run(kakeya, "key", "new", cwd=home, home=home)
    model = home / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gemma3_text"}', encoding="utf-8")
    arguments = ("primary", "--bind", "127.0.0.1:0", "--model", str(model))
    done = subprocess.run(
        [kakeya, *arguments],
        cwd=home,
        env={**clean_environment(), "KAKEYA_HOME": str(home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 2
    assert "mlx" in done.stderr.splitlines()[-1].lower()
