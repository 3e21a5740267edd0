"""Live events over real connections: the reference's summary, topics, changes, limits, and a server that stops."""

from __future__ import annotations

import threading

import pytest

from dashboard import live_events
from tests.dashboard.fixtures_fleet import tell_fleet
from tests.dashboard.kit import snapshot
from tests.dashboard.web_kit import API_KEY, EventStream, Web
from tests.fleet_rig import wait_until
from wire.events import JobEvent

EVENTS = "/v1/network/events"


def test_once_gives_one_summary_and_ends(web: Web) -> None:
    answer = web.call("GET", f"{EVENTS}?once=true")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = answer.text.split("\n")
    assert lines[0] == "event: summary"
    assert lines[1].startswith('data: {"type":"summary","data":{')
    assert lines[2:] == ["", ""]
    assert web.call("GET", f"{EVENTS}?once=1").status == 200


def test_a_stream_begins_with_the_present_state_of_every_topic(web: Web) -> None:
    tell_fleet(web)
    topics = ("nodes", "jobs", "requests", "transfers", "evictions", "security", "series", "kvfs", "groups", "benchmarks")
    with EventStream(web.server.address, f"{EVENTS}?topics={','.join(topics)}") as stream:
        assert stream.status == 200
        assert len(stream.next("nodes")) == 3
        assert len(stream.next("jobs")["active"]) == 1
        assert stream.next("requests")["items"][0]["source"] == "worker"
        assert stream.next("series")["points"]


def test_changes_arrive_while_the_stream_is_open(web: Web) -> None:
    web.tell(snapshot(), "primary")
    with EventStream(web.server.address, f"{EVENTS}?topics=jobs,nodes") as stream:
        assert stream.next("jobs") == {"active": [], "ended": []}
        assert stream.next("nodes")[0]["alias"] == "primary"
        web.clocks.pass_time(2.0)
        web.tell(JobEvent(job_id="j", state="running", tokens_total=10, tokens_done=4), "worker")
        assert stream.next("jobs")["active"][0]["progress"] == 0.4
        web.clocks.pass_time(2.0)
        web.post("/v1/network/nodes/register", {"alias": "fresh", "address": "host:1"})
        while "fresh" not in {node["alias"] for node in stream.next("nodes")}:
            web.clocks.pass_time(2.0)


def test_what_the_key_shows_is_not_sent_to_who_has_none(web: Web) -> None:
    web.tell(snapshot(), "primary")
    with (
        EventStream(web.server.address, f"{EVENTS}?topics=nodes", key=API_KEY) as full,
        EventStream(web.server.address, f"{EVENTS}?topics=nodes") as public,
    ):
        assert full.next("nodes")[0]["endpoint"]["address"] == "192.0.2.7:51051"
        assert public.next("nodes")[0]["endpoint"]["address"] == ""


def test_readers_are_bounded_and_a_reader_that_left_makes_room(web: Web) -> None:
    streams = [EventStream(web.server.address, f"{EVENTS}?topics=bus") for _ in range(live_events.READERS_MAX)]
    for stream in streams:
        assert stream.__enter__().status == 200
    answer = web.call("GET", EVENTS)
    assert (answer.status, answer.json.keys()) == (503, {"detail"})
    assert web.get("/healthz")["status"] == "ok"  # threads are left for everybody else
    for stream in streams:
        stream.__exit__()

    def has_room() -> bool:
        web.clocks.pass_time(5.0)  # the next event finds out that nobody reads
        with EventStream(web.server.address, EVENTS) as stream:
            return stream.status == 200

    wait_until(has_room, "room for a reader")


def test_a_stream_whose_database_fails_ends_with_one_line(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    with EventStream(web.server.address, f"{EVENTS}?topics=groups") as stream:
        assert stream.next("groups") == []
        web.database.rows("ALTER TABLE groups RENAME TO elsewhere")
        web.clocks.pass_time(3.0)
        web.tell(snapshot(), "primary")
        stream.rest()

    def ours() -> list[str]:
        # On a busy machine the web server has a word to say, too.
        return [record.getMessage() for record in caplog.records if record.name.startswith("dashboard")]

    wait_until(lambda: len(ours()) > 0, "a line")
    assert ours() == ["live events ended: OperationalError"]
    assert web.call("GET", "/v1/network/groups").status == 503
    web.database.rows("ALTER TABLE elsewhere RENAME TO groups")
    with EventStream(web.server.address, f"{EVENTS}?topics=groups") as stream:
        assert stream.next("groups") == []


def test_open_streams_end_when_the_server_stops(web: Web) -> None:
    with EventStream(web.server.address, f"{EVENTS}?topics=summary") as stream:
        stream.next("summary")
        ended = threading.Event()
        reader = threading.Thread(target=lambda: (stream.rest(), ended.set()), daemon=True)
        reader.start()
        web.fleet.close()
        assert ended.wait(20.0)
        reader.join(5.0)


@pytest.mark.parametrize("topic", sorted(live_events.TOPICS))
def test_every_topic_is_a_readable_event(web: Web, topic: str) -> None:
    with EventStream(web.server.address, f"{EVENTS}?topics={topic}") as stream:
        stream.next(topic)
