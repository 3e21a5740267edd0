"""Network namespaces of a test's own: a star of veth pairs that can be cut. Linux, root and ``ip`` only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import pytest

CLONE_NEWNET: Final = 0x40000000
_Result = TypeVar("_Result")


def missing() -> str:
    """Why namespaces cannot be used here; empty when they can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is missing (package iproute2)"
    name = f"kk{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def required() -> None:
    """Skip the test where namespaces cannot be used."""
    reason = missing()
    if reason:
        pytest.skip(reason)


@dataclass(frozen=True, slots=True)
class Namespace:
    """One network stack."""

    name: str

    @property
    def wrapper(self) -> tuple[str, ...]:
        """Words that start a command in here; the process keeps its id."""
        return ("ip", "netns", "exec", self.name)

    def enter(self) -> None:
        """Move the calling thread in here, for good; threads that it starts are in here, too."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}", "rb") as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.name}")

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function on a thread in here."""
        found: list[_Result] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self.enter()
                found.append(function())
            except BaseException as error:  # for the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run, name=f"in {self.name}")
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]


class Star:
    """A middle namespace and leaves, each on a link of its own."""

    def __init__(self, middle: str, *leaves: str) -> None:
        label = f"kk{os.getpid() % 100_000}"
        self._made = False
        self.middle = Namespace(f"{label}-{middle}")
        self.leaves = {leaf: Namespace(f"{label}-{leaf}") for leaf in leaves}
        self._devices = {leaf: (f"{label}m{number}", f"{label}l{number}") for number, leaf in enumerate(leaves)}
        self._numbers = {leaf: number for number, leaf in enumerate(leaves, start=1)}

    def address(self, leaf: str) -> str:
        """Of a leaf, as the middle reaches it."""
        return f"10.213.{self._numbers[leaf]}.2"

    def middle_address(self, leaf: str) -> str:
        """Of the middle, as a leaf reaches it."""
        return f"10.213.{self._numbers[leaf]}.1"

    def __enter__(self) -> Star:
        try:
            for namespace in (self.middle, *self.leaves.values()):
                _ip("netns", "add", namespace.name)
                _ip("-n", namespace.name, "link", "set", "lo", "up")
            for leaf, namespace in self.leaves.items():
                inner, outer = self._devices[leaf]
                _ip(
                    *("link", "add", inner, "netns", self.middle.name, "type", "veth"),
                    *("peer", "name", outer, "netns", namespace.name),
                )
                self._raise(self.middle, inner, self.middle_address(leaf))
                self._raise(namespace, outer, self.address(leaf))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for namespace in (self.middle, *self.leaves.values()):
            subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True, check=False)

    def cut(self, leaf: str) -> None:
        """The link is down; nobody is told, as with a pulled cable."""
        _ip("-n", self.leaves[leaf].name, "link", "set", self._devices[leaf][1], "down")

    def mend(self, leaf: str) -> None:
        _ip("-n", self.leaves[leaf].name, "link", "set", self._devices[leaf][1], "up")

    def mute(self, leaf: str) -> None:
        """What the leaf sends to the middle is lost; what is sent to it arrives."""
        _ip("-n", self.leaves[leaf].name, "route", "add", "blackhole", f"{self.middle_address(leaf)}/32")

    def unmute(self, leaf: str) -> None:
        _ip("-n", self.leaves[leaf].name, "route", "del", "blackhole", f"{self.middle_address(leaf)}/32")

    @staticmethod
    def _raise(namespace: Namespace, device: str, address: str) -> None:
        _ip("-n", namespace.name, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", namespace.name, "link", "set", device, "up")


@contextlib.contextmanager
def star(middle: str, *leaves: str) -> Iterator[Star]:
    with Star(middle, *leaves) as made:
        yield made


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
