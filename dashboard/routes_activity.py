"""Routes about what happens: jobs, requests, transfers, evictions, security, logs, series, the bus itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dashboard import api_types as api
from dashboard import present
from dashboard.fleet_view import FleetView
from dashboard.http import Access, Call, Route
from dashboard.redaction import label
from dashboard.routes_benchmarks import checked_limit


def jobs(call: Call) -> api.Jobs:
    at = call.services.fleet.unix_time
    limit = checked_limit(call.query.limit)

    def ask(view: FleetView, now: float) -> api.Jobs:
        who = present.eyes(view, now, admin=call.admin)
        return api.Jobs(
            active=[present.job(entry, at, who) for entry in view.jobs.active()[:limit]],
            ended=[present.job(entry, at, who) for entry in view.jobs.ended()[:limit]],
        )

    return call.services.fleet.read(ask)


def requests(call: Call) -> api.Requests:
    at = call.services.fleet.unix_time
    limit = checked_limit(call.query.limit)

    def ask(view: FleetView, now: float) -> api.Requests:
        who = present.eyes(view, now, admin=call.admin)
        items = [present.request(record, at, who) for record in view.requests.newest(limit)]
        return api.Requests(items=items, total=view.requests.count)

    return call.services.fleet.read(ask)


def transfers(call: Call) -> api.Transfers:
    at = call.services.fleet.unix_time
    limit = checked_limit(call.query.limit)

    def ask(view: FleetView, now: float) -> api.Transfers:
        who = present.eyes(view, now, admin=call.admin)
        items = [present.transfer(record, at, who) for record in view.transfers.newest(limit)]
        return api.Transfers(items=items, total=view.transfers.count)

    return call.services.fleet.read(ask)


def evictions(call: Call) -> api.Evictions:
    at = call.services.fleet.unix_time
    limit = checked_limit(call.query.limit)
    return call.services.fleet.read(
        lambda view, now: api.Evictions(
            items=[present.eviction(record, at) for record in view.evictions.newest(limit)], total=view.evictions.count
        )
    )


def security(call: Call) -> api.Security:
    at = call.services.fleet.unix_time
    limit = checked_limit(call.query.limit)
    return call.services.fleet.read(
        lambda view, now: present.security(view, at, present.eyes(view, now, admin=call.admin), limit)
    )


def logs(call: Call) -> api.Logs:
    at = call.services.fleet.unix_time
    limit = checked_limit(call.query.limit)
    return call.services.fleet.read(
        lambda view, now: api.Logs(items=[present.log_line(record, at) for record in view.logs.newest(limit)])
    )


def series(call: Call) -> api.Series:
    coarse = call.query.resolution == "coarse"
    step_s, buckets = call.services.fleet.read(lambda view, now: view.series(now, coarse=coarse))
    return present.series(step_s, buckets, call.services.fleet.unix_time)


def bus(call: Call) -> api.Bus:
    feed = call.services.feed_figures()

    def ask(view: FleetView, now: float) -> api.Bus:
        last = view.last_message_at
        return api.Bus(
            state=view.bus_state(now).value,
            last_message_age_s=round(now - last, 1) if last is not None else None,
            messages=view.counters["messages"],
            missed=feed.get("missed", 0),
            dropped=feed.get("dropped", 0),
            malformed=view.counters["malformed"] + feed.get("malformed", 0),
            handshakes_rejected=feed.get("handshakes_rejected", 0),
            refused=view.counters["refused"],
            unheard=[
                api.UnheardNode(node_id=peer.node_id, roles=[label(role) for role in peer.roles], told_by=peer.told_by)
                for peer in view.unheard()
            ],
        )

    return call.services.fleet.read(ask)


_V1: Final = "/v1/network"


def _list(name: str, handler: Callable[[Call], Any], summary: str, answer: Any, access: Access = Access.READ) -> Route:
    return Route("GET", f"{_V1}/{name}", handler, summary, answer, access, query=api.LimitQuery, errors=(400,))


ROUTES: Final = (
    _list("jobs", jobs, "Prefill jobs that go on, and the last ones", api.Jobs),
    _list("requests", requests, "The last requests and why they cost what they cost", api.Requests),
    _list("transfers", transfers, "The last bulk transfers", api.Transfers),
    _list("evictions", evictions, "What stores evicted last", api.Evictions),
    _list("security", security, "How often something was refused, by kind", api.Security),
    _list("logs", logs, "Noteworthy lines of all nodes", api.Logs, Access.ADMIN),
    Route("GET", f"{_V1}/series", series, "Time series", api.Series, query=api.SeriesQuery),
    Route("GET", f"{_V1}/bus", bus, "How well this process hears the fleet", api.Bus),
)
