"""Writes docs/faults.md from the table: ``python -m tests.faults.document``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.faults.matrix import MATRIX, MEANINGS, STEP_MEANINGS, Cell, Entry, Fault, Never, Step

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
INTRODUCTION: Final = """# What fails, and what happens then

Every fault below is made at every step, on purpose, with real processes (`tests/faults/test_matrix.py`). What must hold in
each cell: the answer has the same tokens as a cold run and comes by the deadline; the named figures of the status grew
([telemetry.md](telemetry.md)); the reason is given in the request's explanation or among the node's recent events; and
afterwards no socket, lease, reservation, thread or process is left, and every node is used again.

This page is generated: `python -m tests.faults.document`. A test holds it against the table.
"""


def render() -> str:
    """The text of the document."""
    return "\n".join([INTRODUCTION, *_meanings(), *_overview(), *_details(), *_reasons()]).rstrip() + "\n"


def _meanings() -> list[str]:
    lines = ["## The faults", "", "| fault | how it is made |", "|---|---|"]
    lines += [f"| {fault.value} | {MEANINGS[fault]} |" for fault in Fault]
    lines += ["", "## The steps", "", "| step | where it strikes |", "|---|---|"]
    return [*lines, *(f"| {step.value} | {STEP_MEANINGS[step]} |" for step in Step), ""]


def _overview() -> list[str]:
    lines = [
        "## The matrix",
        "",
        "● tested in every run, ○ tested with `deploy/test.sh --all`, a number: cannot occur, with the reason below"
        + (", ✗ fails today, with what is seen below." if _known_bugs() else "."),
        "",
        "| | " + " | ".join(step.value for step in Step) + " |",
        "|---" * (len(Step) + 1) + "|",
    ]
    for fault in Fault:
        lines.append(f"| **{fault.value}** | " + " | ".join(_sign(MATRIX[fault][step]) for step in Step) + " |")
    return [*lines, ""]


def _known_bugs() -> bool:
    return any(isinstance(entry, Cell) and entry.known_bug for row in MATRIX.values() for entry in row.values())


def _sign(entry: Entry) -> str:
    match entry:
        case Never(reason=reason):
            return str(_all_reasons().index(reason) + 1)
        case Cell(known_bug=bug) if bug:
            return "✗"
        case Cell(slow=slow):
            return "○" if slow else "●"


def _all_reasons() -> list[str]:
    found: list[str] = []
    for fault in Fault:
        for step in Step:
            entry = MATRIX[fault][step]
            if isinstance(entry, Never) and entry.reason not in found:
                found.append(entry.reason)
    return found


def _details() -> list[str]:
    lines = [
        "## What is seen",
        "",
        "Figures are written `node.section.figure`.",
        "",
        "| fault | step | figures that grow | figures that do not | the reason says |",
        "|---|---|---|---|---|",
    ]
    for fault in Fault:
        for step in Step:
            entry = MATRIX[fault][step]
            if isinstance(entry, Cell):
                grow, steady = (", ".join(f"`{name}`" for name in names) for names in (entry.counts, entry.steady))
                says = entry.known_bug or (f"“{entry.says}”" if entry.says else "")
                lines.append(f"| {fault.value} | {step.value} | {grow} | {steady} | {says} |")
    return [*lines, ""]


def _reasons() -> list[str]:
    return ["## What cannot occur", "", *(f"{number}. {reason}" for number, reason in enumerate(_all_reasons(), start=1))]


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
