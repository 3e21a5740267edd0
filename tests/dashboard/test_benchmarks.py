"""Benchmark runs: normalisation, summary, the live run, history, and what of them is public."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard import benchmarks
from dashboard.benchmark_store import RUNS_KEPT
from tests.dashboard.web_kit import API_KEY, Web
from wire.errors import InvalidInput

RUNS = "/v1/network/benchmarks"


def stage(name: str = "remote_compute", **fields: Any) -> dict[str, Any]:
    return {"name": name, **fields}


FIRST = stage(
    hit_source="remote_worker",
    prefix_tokens=1000,
    output_tokens=32,
    append_s=4.0,
    decode_s=3.2,
    e2e_s=8.0,
    ttft_s=4.1,
    ok=True,
    complete=True,
    stop_reason="max_tokens",
    delta={"tokens_reused": 900, "bytes_received": 5000},
)
SECOND = stage(
    "primary_hot_hit",
    hit_source="primary_hot",
    prefix_tokens=1000,
    output_tokens=32,
    append_s=0.5,
    decode_s=1.6,
    e2e_s=2.0,
    ttft_s=0.6,
    ok=False,
    complete=False,
    warmup_tokens_reused=500,
    warmup_prefix_tokens=1000,
    delta={"tokens_reused": 1000},
)


def test_rates_of_a_stage_are_derived() -> None:
    made = benchmarks.normalised_stage(FIRST)
    assert made["prefill_or_restore_tok_s"] == 250.0
    assert made["decode_tok_s"] == 10.0
    assert made["generation_latency_ms_per_token"] == 100.0
    assert made["e2e_tok_s"] == 4.0
    assert made["stop_reason"] == "max_tokens"
    empty = benchmarks.normalised_stage(stage())
    assert empty["hit_source"] == "unknown"
    assert (empty["prefill_or_restore_tok_s"], empty["decode_tok_s"], empty["ttft_s"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        stage("unknown_name"),
        stage(hit_source="elsewhere"),
        stage(prefix_tokens=-1),
        stage(append_s=-0.1),
        stage(decode_s="fast"),
        stage(e2e_s=[1]),
        stage(ttft_s="1e999"),
        stage(output_tokens="nan"),
        stage(note="/Users/me/x"),
        stage(agent={"deep": {"block_hash": "x"}}),
        stage(peer_address="a"),
        stage(deep=[[[[[[[[[[1]]]]]]]]]]),
        {"name": ["remote_compute"]},
        {"name": {}},
        stage(hit_source=["primary_hot"]),
        stage(hit_source={"a": 1}),
        stage(note="at C:\\Users\\me"),
        stage(note="/HOME/me"),
        *(
            stage(**{key: "x"})
            for key in ("Prompt", "PROMPTS", "user_prompt", "tokenIds", "Token-Ids", "Block_Hash", "cacheKey")
        ),
        *(stage(**{key: 1}) for key in ("payload_SHA256", "peerAddress", "model_path", "hash")),
        stage(prompt_tokens="what was asked"),
        stage(warmup_tokens_reused=10**400),
        stage(delta={"tokens_reused": 10**400}),
        stage(extra=float("inf")),
        stage(prefix_tokens=1e15, append_s=5e-324),
        stage(output_tokens=1e15, decode_s=5e-324),
        stage(output_tokens=10, e2e_s=1e-300),
    ],
)
def test_bad_stages_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        benchmarks.normalised_stage(bad)


def test_the_summary_is_over_all_stages_also_failed_ones() -> None:
    summary = benchmarks.summarise([benchmarks.normalised_stage(each) for each in (FIRST, SECOND)])
    assert summary == {
        "stages_total": 2,
        "stages_failed": 1,
        "incomplete_stages": 1,
        "stop_reason_counts": {"max_tokens": 1, "unknown": 1},
        "ttft_p50_s": pytest.approx(2.35),
        "prefill_tok_s_p50": 1125.0,
        "decode_tok_s_p50": 15.0,
        "e2e_tok_s_p50": 10.0,
        "generation_latency_ms_p50": 75.0,
        "inference_kv_token_hit_rate": 0.95,
        "workload_kv_token_hit_rate": 0.8,
        "aggregate_decode_tok_s": pytest.approx(64 / 4.8),
        "aggregate_e2e_tok_s": 6.4,
        "bytes_received": 5000,
        "hit_source_counts": {"remote_worker": 1, "primary_hot": 1, "allens_offload": 0, "unknown": 0},
    }
    assert benchmarks.summarise([]) == {}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=12), VALUES, max_size=5))
def test_the_public_part_holds_numbers_and_labels_only(value: dict[str, Any]) -> None:
    def check(shown: Any) -> None:
        if isinstance(shown, dict):
            for key, inner in shown.items():
                check(key)
                check(inner)
        elif isinstance(shown, str):
            assert shown[0].isascii()
            assert shown[0].isalpha()
            assert not set(shown) & set(" ./:\\@\n")
            assert len(shown) <= 48
        else:
            assert isinstance(shown, bool | int | float)

    check(benchmarks.public_part(value))


def test_rates_of_the_summary_are_numbers_whatever_the_stages_hold() -> None:
    extremes = [stage(output_tokens=1e15), stage(decode_s=5e-324, e2e_s=5e-324), stage(delta={"tokens_reused": 10**400})]
    made = [benchmarks.normalised_stage(each) for each in extremes[:2]]
    json.dumps(benchmarks.summarise(made), allow_nan=False)
    assert benchmarks.summarise([{**made[0], **extremes[2]}])["inference_kv_token_hit_rate"] == 0


def test_counts_of_prompt_tokens_are_numbers_like_others() -> None:
    assert benchmarks.normalised_stage(stage(prompt_tokens=7))["prompt_tokens"] == 7
    assert benchmarks.public_part({"prompt_tokens": 7, "prompt_count": 1}) == {"prompt_tokens": 7, "prompt_count": 1}


def test_digests_and_texts_of_unknown_fields_are_not_public() -> None:
    digest = "deadbeefdeadbeef"
    kept = {"model": "gemma-4", "w": "secretprompt", "phase": digest, f"a{digest}": 1, "model_path": 3, "big": 10**30}
    assert benchmarks.public_part(kept) == {"model": "gemma-4"}
    assert benchmarks.public_part({"deep": {"kind": f"x-{digest}-y", "status": "ok"}}) == {"deep": {"status": "ok"}}


def test_a_run_from_beginning_to_end(web: Web) -> None:
    run = web.post(RUNS, {"config": {"output_tokens": 32, "note": "free text."}, "started_at": 5.0}).json
    assert run.keys() == {
        *("id", "schema_version", "kind", "status", "started_at", "finished_at", "config", "stages", "summary")
    }
    assert run["id"].startswith("br_")
    assert (run["schema_version"], run["status"], run["finished_at"], run["stages"]) == (1, "running", None, [])
    assert run["kind"] == "distributed_prefill_fleet_benchmark"
    assert web.get(f"{RUNS}/live", key=API_KEY) == run
    path = f"{RUNS}/{run['id']}"
    patched = web.call("PATCH", path, {"stages": [FIRST]}, key=API_KEY).json
    assert patched["summary"]["stages_total"] == 1
    done = web.call("PATCH", path, {"stages": [SECOND], "status": "completed", "finished_at": 9.0}, key=API_KEY).json
    assert (done["status"], done["finished_at"], done["summary"]["stages_failed"]) == ("completed", 9.0, 1)
    assert web.get(f"{RUNS}/live") is None
    assert web.get(path, key=API_KEY) == done
    assert web.get(f"{path}/stages?offset=1&limit=1", key=API_KEY) == {"items": done["stages"][1:], "total": 2}
    assert web.call("GET", f"{path}/stages?offset=-1").status == 400
    (row,) = web.get(RUNS, key=API_KEY)
    assert "stages" not in row
    assert row["summary"] == done["summary"]


def test_a_refused_stage_changes_nothing_of_the_run(web: Web) -> None:
    run = web.post(RUNS, {}).json["id"]
    answer = web.call("PATCH", f"{RUNS}/{run}", {"stages": [FIRST, {"name": "x"}], "status": "failed"}, key=API_KEY)
    assert answer.status == 400
    assert web.call("PATCH", f"{RUNS}/{run}", {"status": "great"}, key=API_KEY).status == 400
    assert web.call("PATCH", f"{RUNS}/br_none", {"status": "failed"}, key=API_KEY).status == 404
    assert (web.get(f"{RUNS}/{run}")["status"], web.get(f"{RUNS}/{run}")["stages"]) == ("running", [])


def test_a_new_run_is_the_live_one_and_a_finished_older_one_does_not_end_it(web: Web) -> None:
    first, second = (web.post(RUNS, {}).json["id"] for _ in range(2))
    web.call("PATCH", f"{RUNS}/{first}", {"status": "failed"}, key=API_KEY)
    assert web.get(f"{RUNS}/live")["id"] == second
    assert [run["id"] for run in web.get(RUNS)] == [second, first]
    assert [run["id"] for run in web.get(f"{RUNS}?status=failed")] == [first]


def test_only_the_last_runs_are_kept(web: Web) -> None:
    store = web.services.benchmarks
    ids = [store.create("k", {}, 0.0).id for _ in range(RUNS_KEPT + 3)]
    kept = [run["id"] for run in web.get(f"{RUNS}?limit=200")]
    assert kept == list(reversed(ids))[:RUNS_KEPT]


def test_the_public_sees_numbers_and_labels_of_stages(web: Web) -> None:
    run = web.post(RUNS, {"kind": "my kind: 10.0.0.1", "config": {"model_id": "gemma-4", "host": "10.0.0.1:5"}}).json["id"]
    extra = {**FIRST, "agent": "critic", "output_preview": "telltale prompt.", "ids": [1, 2, 3], "round": 2}
    web.call("PATCH", f"{RUNS}/{run}", {"stages": [extra]}, key=API_KEY)
    public = web.get(f"{RUNS}/{run}")
    assert (public["kind"], public["config"]) == ("other", {"model_id": "gemma-4"})
    (shown,) = public["stages"]
    assert (shown["agent"], shown["round"], shown["delta"]) == ("critic", 2, FIRST["delta"])
    assert not {"output_preview", "ids"} & shown.keys()
