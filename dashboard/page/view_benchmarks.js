/** Benchmark runs: the one that goes on, its phases side by side, those of the past, and every stage of one. */

import { get, reasonOf } from "./api.js";
import { h } from "./dom.js";
import { NONE, bytes, clock, count, duration, milliseconds, percent, rate, seconds } from "./format.js";
import { badge, empty, facts, message, section, table } from "./parts.js";

const HISTORY = 20;
const EVERY_MS = 10_000;
const PHASES_SHOWN = 12;
const SOURCES = { remote_worker: "worker", primary_hot: "local cache", allens_offload: "cache peer", unknown: "unknown" };

export class BenchmarksView {
  title = "Benchmarks";
  topics = ["summary", "bus", "benchmarks"];

  constructor(page) {
    this.page = page;
    this.runs = null;
    this.problem = "";
    this.chosen = null; // the run of the detail, with its stages
    this.loadedAt = -Infinity;
    this.loadedFor = "";
  }

  entered() {
    this.loadedAt = -Infinity;
  }

  render(store) {
    const live = store.data.benchmarks ?? null;
    this.#keepFresh(live);
    const shown = live ?? this.chosen;
    return [
      section("Live", {}, live ? liveCard(live) : empty("No benchmark runs", "One that a program reports with POST /v1/network/benchmarks is shown here while it runs.")),
      shown?.stages.length > 0 && section("Phases", { note: live ? "of the live run" : `of ${shown.id}` }, h("ul", { class: "cards" }, shown.stages.slice(-PHASES_SHOWN).map(phaseCard))),
      section("History", { note: this.runs?.length ? String(this.runs.length) : undefined }, this.problem && message("bad", this.problem), this.#history()),
      this.chosen && section("Run", { note: this.chosen.id, key: "detail" }, runDetail(this.chosen)),
    ];
  }

  /** The list has no events of its own: it is read again when the live run changes, and now and then. */
  #keepFresh(live) {
    const state = live ? `${live.id} ${live.stages.length}` : "";
    if (state === this.loadedFor && performance.now() - this.loadedAt < EVERY_MS) return;
    this.loadedFor = state;
    this.loadedAt = performance.now();
    this.#load(`v1/network/benchmarks?limit=${HISTORY}`, (runs) => (this.runs = runs));
    if (this.chosen?.status === "running") this.#choose(this.chosen.id);
  }

  #choose(id) {
    this.#load(`v1/network/benchmarks/${encodeURIComponent(id)}`, (run) => (this.chosen = run));
  }

  #load(path, take) {
    get(path)
      .then(
        (answer) => {
          take(answer);
          this.problem = "";
        },
        (error) => (this.problem = reasonOf(error)),
      )
      .finally(() => this.page.refresh());
  }

  #history() {
    if (!this.runs) return empty("Reading the runs");
    if (!this.runs.length) return empty("No run yet", "The last 200 runs are kept, failed ones too.");
    const sum = (run, name) => run.summary[name] ?? 0;
    return table({
      caption: "Benchmark runs, newest first",
      items: this.runs,
      key: (run) => run.id,
      columns: [
        { head: "Run", className: "title", cell: (run) => h("button", { type: "button", class: "link", "aria-pressed": this.chosen?.id === run.id ? "true" : "false", onclick: () => this.#choose(run.id) }, run.id) },
        { head: "Status", cell: (run) => badge(run.status) },
        { head: "Started", cell: (run) => h("span", { class: "nowrap" }, clock(run.started_at)) },
        { head: "Stages", number: true, cell: (run) => stagesInWords(run.summary) },
        { head: "Worker / local / peer", number: true, cell: (run) => hits(run.summary) },
        { head: "KV hit", number: true, cell: (run) => percent(sum(run, "workload_kv_token_hit_rate")) },
        { head: "Prefill", number: true, cell: (run) => rate(sum(run, "prefill_tok_s_p50")) },
        { head: "Decode", number: true, cell: (run) => rate(sum(run, "decode_tok_s_p50")) },
        { head: "Per token", number: true, cell: (run) => milliseconds(sum(run, "generation_latency_ms_p50")) },
        { head: "End to end", number: true, cell: (run) => rate(sum(run, "e2e_tok_s_p50")) },
      ],
    });
  }
}

function stagesInWords(summary) {
  const failures = summary.stages_failed ?? 0;
  return failures ? `${count(summary.stages_total)} (${count(failures)} failed)` : count(summary.stages_total ?? 0);
}

function hits(summary) {
  const found = summary.hit_source_counts ?? {};
  return ["remote_worker", "primary_hot", "allens_offload"].map((source) => count(found[source] ?? 0)).join(" / ");
}

function liveCard(run) {
  const last = run.stages.at(-1);
  return facts([
    ["Run", h("code", null, run.id)],
    ["Status", badge(run.status)],
    ["Kind", run.kind.replaceAll("_", " ")],
    ["Started", clock(run.started_at)],
    ["Stages", count(run.stages.length)],
    ["Last stage", last ? title(last) : NONE],
  ]);
}

function title(stage) {
  if (stage.agent) return stage.round === undefined ? String(stage.agent) : `${stage.agent}, round ${stage.round}`;
  return String(stage.phase ?? stage.name).replaceAll("_", " ");
}

function passed(stage) {
  return (stage.ok ?? true) ? badge("pass", "good") : badge("fail", "bad");
}

function phaseCard(stage, index) {
  return h(
    "li",
    { class: "card phase", key: index },
    h("header", { class: "card-head" }, h("h3", null, title(stage)), h("span", { class: "push" }, passed(stage))),
    facts([
      ["Source", SOURCES[stage.hit_source] ?? stage.hit_source],
      ["First token", seconds(stage.ttft_s)],
      ["Prefill or restore", rate(stage.prefill_or_restore_tok_s)],
      ["Decode", rate(stage.decode_tok_s)],
      ["Per token", milliseconds(stage.generation_latency_ms_per_token)],
      ["End to end", rate(stage.e2e_tok_s)],
      ["Stopped by", stage.stop_reason],
      ["Complete", stage.complete === undefined ? "" : stage.complete ? "yes" : "no"],
      ["Review", stage.review_scope],
      ["Critic's context", stage.critic_context_tokens === undefined ? "" : `${count(stage.critic_context_tokens)} tokens`],
    ]),
  );
}

function runDetail(run) {
  const summary = run.summary;
  return [
    facts(
      [
        ["Status", badge(run.status)],
        ["Started", clock(run.started_at)],
        ["Took", run.finished_at === null ? "" : duration(run.finished_at - run.started_at)],
        ["First token, median", seconds(summary.ttft_p50_s ?? 0)],
        ["KV hit, inference", percent(summary.inference_kv_token_hit_rate ?? 0)],
        ["KV hit, with warm-up", percent(summary.workload_kv_token_hit_rate ?? 0)],
        ["Received", bytes(summary.bytes_received ?? 0)],
        ["Decode, all", rate(summary.aggregate_decode_tok_s)],
        ["Incomplete", count(summary.incomplete_stages ?? 0)],
      ],
      "wide",
    ),
    run.stages.length
      ? table({
          caption: `Stages of ${run.id}`,
          items: run.stages.map((stage, index) => ({ stage, index })),
          key: ({ index }) => index,
          columns: [
            { head: "Phase", className: "title", cell: ({ stage }) => title(stage) },
            { head: "Result", cell: ({ stage }) => passed(stage) },
            { head: "Source", cell: ({ stage }) => SOURCES[stage.hit_source] ?? stage.hit_source },
            { head: "Stop", cell: ({ stage }) => stage.stop_reason ?? NONE },
            { head: "First token", number: true, cell: ({ stage }) => seconds(stage.ttft_s) },
            { head: "Prefill / restore", number: true, cell: ({ stage }) => rate(stage.prefill_or_restore_tok_s) },
            { head: "Decode", number: true, cell: ({ stage }) => rate(stage.decode_tok_s) },
            { head: "Per token", number: true, cell: ({ stage }) => milliseconds(stage.generation_latency_ms_per_token) },
            { head: "End to end", number: true, cell: ({ stage }) => seconds(stage.e2e_s) },
          ],
        })
      : empty("This run has no stage yet"),
  ];
}
