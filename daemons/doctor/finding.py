"""What an examination says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could."""
    PROBLEM = "problem"
    """Something does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line about ``subject``; ``remedy``: what to do, in one line, empty when nothing needs to be done."""

    subject: str
    level: Level
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, Level.OK, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Level.WARNING, text, remedy)


def problem(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Level.PROBLEM, text, remedy)
