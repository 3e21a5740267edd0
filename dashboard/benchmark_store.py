"""Benchmark runs in the database: a row a run, a row a stage."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboard import benchmarks
from dashboard.database import Database
from dashboard.state import NotThere, StateError

RUNS_KEPT: Final = 200
STAGES_MAX: Final = 5_000
"""Stages of one run."""
STAGE_CHARACTERS_MAX: Final = 32 * 1024
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One run; ``summary`` is over all of its stages, ``stages`` may be left out."""

    id: str
    kind: str
    status: str
    started_at: float
    finished_at: float | None
    config: dict[str, Any]
    summary: dict[str, Any]
    stages: tuple[dict[str, Any], ...]


class BenchmarkStore:
    """Runs, safe to use from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, kind: str, config: Mapping[str, Any], started_at: float) -> Run:
        """A new run, which is the live one from now on; the oldest beyond :data:`RUNS_KEPT` goes.

        Raises:
            InvalidInput: the config is not public-safe.
        """
        benchmarks.check_public_safe(config)
        run_id = f"br_{secrets.token_hex(8)}"
        with self._database.transaction() as connection:
            connection.execute("UPDATE benchmark_runs SET live = 0 WHERE live = 1")
            connection.execute(
                "INSERT INTO benchmark_runs (id, kind, status, started_at, config, summary, live)"
                " VALUES (?, ?, 'running', ?, ?, '{}', 1)",
                (run_id, kind, started_at, _compact(config)),
            )
            connection.execute(
                "DELETE FROM benchmark_runs WHERE number <= (SELECT max(number) FROM benchmark_runs) - ?", (RUNS_KEPT,)
            )
            return _load(connection, run_id)

    def update(self, run_id: str, stages: Sequence[Mapping[str, Any]], status: str | None, finished_at: float | None) -> Run:
        """Append stages and set what is given. A run that leaves ``running`` is not live any more.

        Raises:
            NotThere: no such run.
            InvalidInput: unknown status, or a stage that cannot be kept; then nothing is changed.
        """
        if status is not None and status not in benchmarks.STATUSES:
            raise StateError(f"status is one of {', '.join(benchmarks.STATUSES)}")
        rows = [_compact(benchmarks.normalised_stage(stage)) for stage in stages]
        if any(len(row) > STAGE_CHARACTERS_MAX for row in rows):
            raise StateError(f"a stage is larger than {STAGE_CHARACTERS_MAX} characters")
        with self._database.transaction() as connection:
            _require(connection, run_id)
            (count,) = connection.execute("SELECT count(*) FROM benchmark_stages WHERE run_id = ?", (run_id,)).fetchone()
            if count + len(rows) > STAGES_MAX:
                raise StateError(f"a run has at most {STAGES_MAX} stages")
            connection.executemany(
                "INSERT INTO benchmark_stages (run_id, position, stage) VALUES (?, ?, ?)",
                [(run_id, count + offset, row) for offset, row in enumerate(rows)],
            )
            if status is not None:
                connection.execute(
                    "UPDATE benchmark_runs SET status = ?, live = live AND ? = 'running' WHERE id = ?",
                    (status, status, run_id),
                )
            if finished_at is not None:
                connection.execute("UPDATE benchmark_runs SET finished_at = ? WHERE id = ?", (finished_at, run_id))
            if rows:
                summary = _compact(benchmarks.summarise(_stages(connection, run_id)))
                connection.execute("UPDATE benchmark_runs SET summary = ? WHERE id = ?", (summary, run_id))
            return _load(connection, run_id)

    def run(self, run_id: str) -> Run:
        """One run with its stages.

        Raises:
            NotThere: no such run.
        """
        with self._database.snapshot() as connection:
            _require(connection, run_id)
            return _load(connection, run_id)

    def live(self) -> Run | None:
        """The run that goes on, with its stages."""
        with self._database.snapshot() as connection:
            row = connection.execute("SELECT id FROM benchmark_runs WHERE live = 1").fetchone()
            return _load(connection, row["id"]) if row is not None else None

    def newest(self, limit: int, status: str | None) -> list[Run]:
        """Newest first, without their stages."""
        with self._database.snapshot() as connection:
            rows = connection.execute(
                "SELECT id FROM benchmark_runs WHERE ?1 IS NULL OR status = ?1 ORDER BY number DESC LIMIT ?2",
                (status, limit),
            ).fetchall()
            return [_load(connection, row["id"], with_stages=False) for row in rows]

    def stages(self, run_id: str, offset: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        """(stages in their order, how many there are).

        Raises:
            NotThere: no such run.
        """
        with self._database.snapshot() as connection:
            _require(connection, run_id)
            (total,) = connection.execute("SELECT count(*) FROM benchmark_stages WHERE run_id = ?", (run_id,)).fetchone()
            rows = connection.execute(
                "SELECT stage FROM benchmark_stages WHERE run_id = ? ORDER BY position LIMIT ? OFFSET ?",
                (run_id, limit, offset),
            ).fetchall()
            return [json.loads(row["stage"]) for row in rows], total


def _require(connection: sqlite3.Connection, run_id: str) -> None:
    if connection.execute("SELECT 1 FROM benchmark_runs WHERE id = ?", (run_id,)).fetchone() is None:
        raise NotThere("there is no such benchmark run")


def _load(connection: sqlite3.Connection, run_id: str, *, with_stages: bool = True) -> Run:
    row = connection.execute("SELECT * FROM benchmark_runs WHERE id = ?", (run_id,)).fetchone()
    return Run(
        id=row["id"],
        kind=row["kind"],
        status=row["status"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        config=json.loads(row["config"]),
        summary=json.loads(row["summary"]),
        stages=tuple(_stages(connection, run_id)) if with_stages else (),
    )


def _stages(connection: sqlite3.Connection, run_id: str) -> list[dict[str, Any]]:
    found = connection.execute("SELECT stage FROM benchmark_stages WHERE run_id = ? ORDER BY position", (run_id,))
    return [json.loads(row["stage"]) for row in found]


def _compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
