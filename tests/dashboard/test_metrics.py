"""Metrics: the exposition can be parsed, follows the conventions, holds the fleet's figures, and fits the Grafana board."""

from __future__ import annotations

import json
import re

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboard.fixtures_fleet import PRIVATE, tell_fleet
from tests.dashboard.kit import snapshot
from tests.dashboard.web_kit import Web
from tests.fleet_rig import PROJECT

GRAFANA = PROJECT / "deploy" / "grafana" / "kakeya.json"


def families(web: Web) -> dict[str, Metric]:
    answer = web.call("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(family: Metric, **labels: str) -> float:
    (found,) = [s.value for s in family.samples if labels.items() <= s.labels.items() and not s.name.endswith("_created")]
    return found


def test_the_fleet_is_in_the_metrics(web: Web) -> None:
    tell_fleet(web)
    found = families(web)
    assert value(found["kakeya_node_up"], node="primary", role="primary") == 1.0
    assert value(found["kakeya_cache_used_bytes"], node="primary") == 300.0
    assert value(found["kakeya_prefill_tokens_reused"], node="primary") == 300.0
    assert value(found["kakeya_refusals"], node="primary") == 4.0
    assert value(found["kakeya_worker_queued_tokens"], node="worker-1") == 0.0
    assert value(found["kakeya_jobs_active"]) == 1.0
    buckets = {s.labels["le"]: s.value for s in found["kakeya_time_to_first_token_seconds"].samples if "le" in s.labels}
    assert (buckets["0.1"], buckets["0.25"], buckets["+Inf"]) == (0.0, 1.0, 1.0)


def test_names_follow_the_conventions_and_labels_are_public(web: Web) -> None:
    tell_fleet(web)
    text = web.call("GET", "/metrics").text
    assert not any(word in text for word in PRIVATE)
    for family in families(web).values():
        assert re.fullmatch(r"kakeya_[a-z][a-z0-9_]*", family.name)
        assert family.documentation
        assert not re.search(r"_(ms|kb|mb|percent)(_|$)", family.name)
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)


def test_counters_do_not_go_backwards_when_a_node_restarts(web: Web) -> None:
    def reused() -> float:
        return value(families(web)["kakeya_prefill_tokens_reused"], node="n")

    web.tell(snapshot(sections={"prefill": {"tokens_reused": 90}}), "n", incarnation=1)
    assert reused() == 90.0
    web.tell(snapshot(sections={"prefill": {"tokens_reused": 4}}), "n", incarnation=2)
    assert reused() == 94.0


def test_hostile_names_do_not_break_the_exposition(web: Web) -> None:
    name = 'x"} 1\nkakeya_fake 1 <script> ‮\\'
    web.tell(snapshot(), name)
    found = families(web)
    assert "kakeya_fake" not in found
    assert value(found["kakeya_node_up"], node=name) == 1.0


def board_queries() -> list[str]:
    board = json.loads(GRAFANA.read_text("utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def test_every_query_of_the_grafana_board_asks_for_metrics_that_exist(web: Web) -> None:
    tell_fleet(web)
    names = {sample.name for family in families(web).values() for sample in family.samples}
    for query in board_queries():
        asked = set(re.findall(r"kakeya_[a-z0-9_]+", query))
        assert asked, query
        assert asked <= names, query


def test_the_grafana_board_is_complete() -> None:
    board = json.loads(GRAFANA.read_text("utf-8"))
    assert board["title"] == "Kakeya"
    assert len(board_queries()) >= 12
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = {(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
    assert len(cells) == sum(p["w"] * p["h"] for p in places)  # no two panels overlap
    assert all(p["x"] + p["w"] <= 24 for p in places)
