"""Routes of benchmark runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dashboard import api_types as api
from dashboard.benchmark_store import SCHEMA_VERSION, Run
from dashboard.benchmarks import public_label, public_part
from dashboard.http import LARGE_BODY_BYTES_MAX, Access, Call, Route
from dashboard.state import StateError

LIMIT_MAX: Final = 200


def newest(call: Call) -> list[api.BenchmarkRow]:
    query: api.RunsQuery = call.query
    runs = call.services.benchmarks.newest(checked_limit(query.limit), query.status)
    return [api.BenchmarkRow(**_fields(run, call.admin)) for run in runs]


def live(call: Call) -> api.Benchmark | None:
    run = call.services.benchmarks.live()
    return _full(run, call.admin) if run is not None else None


def one(call: Call) -> api.Benchmark:
    return _full(call.services.benchmarks.run(call.path["run_id"]), call.admin)


def stages(call: Call) -> api.Stages:
    query: api.StagesQuery = call.query
    if query.offset < 0:
        raise StateError("offset is at least 0")
    found, total = call.services.benchmarks.stages(call.path["run_id"], query.offset, checked_limit(query.limit))
    return api.Stages(items=_shown(found, call.admin), total=total)


def create(call: Call) -> api.Benchmark:
    body: api.BenchmarkBody = call.body
    started_at = body.started_at if body.started_at is not None else call.services.wall_clock()
    return _full(call.services.benchmarks.create(body.kind, body.config, started_at), call.admin)


def update(call: Call) -> api.Benchmark:
    body: api.BenchmarkUpdateBody = call.body
    run = call.services.benchmarks.update(call.path["run_id"], body.stages, body.status, body.finished_at)
    return _full(run, call.admin)


def checked_limit(limit: int) -> int:
    """The limit of a list.

    Raises:
        StateError: out of range.
    """
    if not 1 <= limit <= LIMIT_MAX:
        raise StateError(f"limit is from 1 to {LIMIT_MAX}")
    return limit


def _fields(run: Run, admin: bool) -> dict[str, Any]:
    return {
        "id": run.id,
        "schema_version": SCHEMA_VERSION,
        "kind": run.kind if admin else (public_label(run.kind) or "other"),
        "status": run.status,
        "started_at": run.started_at,
        "finished_at": run.finished_at,
        "config": run.config if admin else public_part(run.config),
        "summary": run.summary if admin else public_part(run.summary),
    }


def _full(run: Run, admin: bool) -> api.Benchmark:
    return api.Benchmark(**_fields(run, admin), stages=_shown(run.stages, admin))


def _shown(found: Sequence[Mapping[str, Any]], admin: bool) -> list[dict[str, Any]]:
    return [dict(stage) if admin else public_part(stage) for stage in found]


_BENCHMARKS: Final = "/v1/network/benchmarks"
ROUTES: Final = (
    Route(
        "GET",
        _BENCHMARKS,
        newest,
        "Runs, newest first, without their stages",
        list[api.BenchmarkRow],
        query=api.RunsQuery,
        errors=(400,),
    ),
    Route("GET", f"{_BENCHMARKS}/live", live, "The run that goes on, or null", api.Benchmark | None),
    Route("GET", f"{_BENCHMARKS}/<run_id>", one, "One run", api.Benchmark, errors=(404,)),
    Route(
        "GET",
        f"{_BENCHMARKS}/<run_id>/stages",
        stages,
        "Stages of a run, in their order",
        api.Stages,
        query=api.StagesQuery,
        errors=(400, 404),
    ),
    Route(
        "POST",
        _BENCHMARKS,
        create,
        "Begin a run",
        api.Benchmark,
        Access.WRITE,
        body=api.BenchmarkBody,
        errors=(400,),
    ),
    Route(
        "PATCH",
        f"{_BENCHMARKS}/<run_id>",
        update,
        "Append stages, set status or end",
        api.Benchmark,
        Access.WRITE,
        body=api.BenchmarkUpdateBody,
        body_bytes_max=LARGE_BODY_BYTES_MAX,
        errors=(400, 404),
    ),
)
