"""The web application: all routes, the page, the live events, the metrics, the OpenAPI document."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any, Final

import msgspec
from flask import Flask, Response, request

from dashboard import api_types as api
from dashboard import openapi, routes_activity, routes_benchmarks, routes_network
from dashboard.hosts import HostRule
from dashboard.http import Attempts, Call, Route, add_route, install_frame
from dashboard.live_events import TOPICS, LiveEvents
from dashboard.metrics import MEDIA_TYPE, Exposition
from dashboard.services import Services
from dashboard.state import NotThere, StateError

PAGE_FOLDER: Final = Path(__file__).parent / "page"
HTML: Final = "text/html"
EVENT_STREAM: Final = "text/event-stream"


class Site:
    """The routes that answer with something else than JSON values."""

    def __init__(self, services: Services) -> None:
        self._metrics = Exposition(services)
        self._events = LiveEvents(services)
        self._document = b""
        self._assets = _page_files()

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/", self.page, "The dashboard", HTML),
            Route("GET", "/network", self.page, "The dashboard", HTML),
            Route("GET", "/assets/<name>", self.asset, "A file of the page", "application/octet-stream", errors=(404,)),
            Route("GET", "/metrics", self.metrics, "Metrics for Prometheus", "text/plain"),
            Route("GET", "/openapi.json", self.openapi, "This document", dict[str, Any]),
            Route(
                "GET",
                "/v1/network/events",
                self.events,
                f"Server-sent events; topics: {', '.join(TOPICS)}",
                EVENT_STREAM,
                query=api.EventsQuery,
                errors=(400,),
            ),
        )

    def describe(self, routes: tuple[Route, ...]) -> None:
        """Make the OpenAPI document of these routes."""
        self._document = msgspec.json.encode(openapi.document(routes))

    def page(self, call: Call) -> Response:
        return self._file("index.html")

    def asset(self, call: Call) -> Response:
        return self._file(call.path["name"])

    def metrics(self, call: Call) -> Response:
        return _no_store(Response(self._metrics.text(), content_type=MEDIA_TYPE))

    def openapi(self, call: Call) -> Response:
        return _no_store(Response(self._document, mimetype="application/json"))

    def events(self, call: Call) -> Response:
        query: api.EventsQuery = call.query
        if query.once:
            return _event_response(Response(self._events.once(call.admin), mimetype=EVENT_STREAM))
        topics = tuple(dict.fromkeys(name for name in query.topics.split(",") if name))
        if not topics or any(name not in TOPICS for name in topics):
            raise StateError("an unknown topic", remedy=f"topics are {', '.join(TOPICS)}")
        return _event_response(Response(self._events.stream(topics, call.admin), mimetype=EVENT_STREAM))

    def _file(self, name: str) -> Response:
        path = self._assets.get(name)
        if path is None:
            raise NotThere("the page has no such file")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        response = Response(path.read_bytes(), mimetype=kind)
        response.headers["Cache-Control"] = "no-cache"
        response.add_etag()
        return response.make_conditional(request)  # type: ignore[return-value]


def create_app(services: Services, hosts: HostRule) -> Flask:
    """The application of the dashboard; it answers to the names of ``hosts`` only."""
    app = Flask("dashboard", static_folder=None)
    app.url_map.merge_slashes = False
    install_frame(app, hosts)
    site = Site(services)
    routes = (
        *site.routes(),
        *routes_network.ROUTES,
        *routes_benchmarks.ROUTES,
        *routes_activity.ROUTES,
    )
    site.describe(routes)
    app.extensions["routes"] = routes
    attempts = Attempts(services.fleet.clock)
    for route in routes:
        add_route(app, services, attempts, route)
    return app


def _page_files() -> dict[str, Path]:
    """Files of the page by name: only what is there at start can be asked for, so no path is ever built of a request."""
    if not PAGE_FOLDER.is_dir():
        return {}
    return {path.name: path for path in sorted(PAGE_FOLDER.iterdir()) if path.is_file()}


def _no_store(response: Response) -> Response:
    response.headers["Cache-Control"] = "no-store"
    return response


def _event_response(response: Response) -> Response:
    response.headers["Cache-Control"] = "no-store"
    # Proxies that collect answers would hold events back.
    response.headers["X-Accel-Buffering"] = "no"
    return response
