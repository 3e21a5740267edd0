/** The fleet at a glance. */

import { call } from "./api.js";
import { Chart, condense } from "./charts.js";
import { h } from "./dom.js";
import { bytes, clock, compact, count, milliseconds, percent, rate } from "./format.js";
import { fleetMap } from "./map.js";
import { SOURCE_NAMES, capacity, empty, name, section, sourceBadge, tile } from "./parts.js";
import { aliasOf } from "./store.js";
import { jobCards } from "./view_prefill.js";

const SPANS = [
  { id: "15 min", seconds: 900, resolution: "fine" },
  { id: "1 h", seconds: 3600, resolution: "fine" },
  { id: "24 h", seconds: 86_400, resolution: "coarse" },
];
const COARSE_EVERY_MS = 60_000;
const EVENTS_SHOWN = 6;

export class OverviewView {
  title = "Overview";
  topics = ["summary", "bus", "nodes", "groups", "jobs", "requests", "series"];

  constructor(page) {
    this.page = page;
    this.span = SPANS[0];
    this.cached = { points: null, span: null, rows: null };
    this.charts = makeCharts();
    for (const chart of this.charts) chart.onHover = () => page.refresh();
    this.coarseAt = -Infinity;
  }

  /** The past of the series; live events add to it. */
  entered() {
    this.#load("fine");
  }

  themeChanged() {
    for (const chart of this.charts) chart.redraw();
  }

  #load(resolution) {
    if (resolution === "coarse") this.coarseAt = performance.now();
    call("GET", `v1/network/series?resolution=${resolution}`).then(
      (series) => {
        this.page.store.mergeSeries(resolution, series);
        this.page.refresh();
      },
      () => {}, // The connection's own state already says that the dashboard is away.
    );
  }

  render(store) {
    const summary = store.data.summary;
    if (!summary) return empty("Waiting for the dashboard");
    if (this.span.resolution === "coarse" && performance.now() - this.coarseAt > COARSE_EVERY_MS) this.#load("coarse");
    return [
      h("dl", { class: "tiles" }, tiles(summary)),
      h(
        "div",
        { class: "columns" },
        section("Fleet", { note: nodesInWords(summary), className: "wide" }, fleetMap(store)),
        h(
          "div",
          { class: "stack" },
          section("Shared cache", { note: percent(share(summary)) }, capacity(summary.cache_bytes_used, summary.cache_bytes_free, "Shared cache")),
          section("Prefill now", { note: summary.jobs_active ? `${summary.jobs_active} active` : undefined }, jobCards(store, store.data.jobs?.active.slice(0, 4) ?? [])),
          section("Latest prompts", {}, latest(store)),
        ),
      ),
      section("Over time", { tools: this.#spanChoice() }, h("div", { class: "charts" }, this.charts.map((chart) => chart.view(this.#condensed(store))))),
    ];
  }

  #condensed(store) {
    const series = store.series[this.span.resolution];
    if (this.cached.points !== series.points || this.cached.span !== this.span) {
      this.cached = { points: series.points, span: this.span, rows: condense(series, this.span.seconds) };
    }
    return this.cached.rows;
  }

  #spanChoice() {
    return h(
      "div",
      { class: "choice", role: "group", "aria-label": "How far back" },
      SPANS.map((span) =>
        h(
          "button",
          {
            type: "button",
            key: span.id,
            "aria-pressed": span === this.span ? "true" : "false",
            onclick: () => {
              this.span = span;
              this.page.refresh();
            },
          },
          span.id,
        ),
      ),
    );
  }
}

function share(summary) {
  const total = summary.cache_bytes_used + summary.cache_bytes_free;
  return total ? summary.cache_bytes_used / total : 0;
}

function nodesInWords(summary) {
  return summary.stale_nodes ? `${summary.online_nodes} online, ${summary.stale_nodes} stale` : `${summary.online_nodes} online`;
}

function tiles(summary) {
  const prefill = summary.prefill;
  const failures = prefill.publish_failures ?? 0;
  return [
    tile("Online nodes", count(summary.online_nodes), summary.stale_nodes ? `${summary.stale_nodes} stale` : `of ${summary.registered_nodes}`, summary.stale_nodes ? "warning" : ""),
    tile("Inference groups", count(summary.groups)),
    tile("Completed tokens", compact(summary.completed_tokens)),
    tile("KV-assisted tokens", percent(summary.kv_hit_rate), "of all prompt tokens", "accent"),
    tile("Shared cache online", bytes(summary.cache_bytes_used), `${bytes(summary.cache_bytes_free)} free`),
    tile("Remote prefill jobs", compact(prefill.remote_jobs ?? 0), failed(prefill.remote_job_failures)),
    tile("Remote KV imports", compact(prefill.remote_hits ?? 0), bytes(prefill.bytes_received ?? 0)),
    tile("Tokens reused", compact(prefill.tokens_reused ?? 0), `${compact(prefill.tokens_computed ?? 0)} computed`),
    tile("LRU evictions", compact(summary.cache_evictions), bytes(summary.cache_bytes_evicted)),
    tile("Publish failures", compact(failures), failures && prefill.last_publish_error ? prefill.last_publish_error : `of ${compact(prefill.publish_attempts ?? 0)}`, failures ? "warning" : ""),
  ];
}

function failed(number) {
  return number ? `${compact(number)} failed` : undefined;
}

function latest(store) {
  const found = (store.data.requests?.items ?? []).filter((request) => request.operation === "append").slice(0, EVENTS_SHOWN);
  if (!found.length) return empty("No prompt yet", "Each prompt is shown here with where its KV came from.");
  return h(
    "ul",
    { class: "events" },
    found.map((request) =>
      h(
        "li",
        { key: `${request.node_id} ${request.request_id}` },
        h("span", { class: "time" }, clock(request.at)),
        sourceBadge(request.source),
        h("span", { class: "grow" }, `${count(request.boundary)} of ${count(request.prompt_tokens)} tokens reused `, h("span", { class: "soft" }, "on ", name(aliasOf(store, request.node_id)))),
        h("span", { class: "number" }, milliseconds(request.elapsed_ms)),
      ),
    ),
  );
}

function makeCharts() {
  const ttft = Object.entries(SOURCE_NAMES).filter(([source]) => source !== "other");
  return [
    new Chart({
      title: "Hit rate",
      lines: [{ label: "reused", ink: "accent", kind: "dots", value: (row) => row.hit_rate }],
      show: percent,
      top: 1,
    }),
    new Chart({
      title: "Prompt tokens",
      // The second bars are drawn over the first: what remains to be seen of those is the difference.
      lines: [
        { label: "all", ink: "source-computed", kind: "bars", value: (row) => (row.tokens_reused + row.tokens_computed) / row.step_s },
        { label: "reused", ink: "accent", kind: "bars", value: (row) => row.tokens_reused / row.step_s },
      ],
      show: (value) => `${value < 10 ? Number(value.toFixed(1)) : compact(Math.round(value))}/s`,
    }),
    new Chart({
      title: "Bytes moved",
      lines: [{ label: "received", ink: "accent", kind: "bars", value: (row) => row.bytes_moved / row.step_s }],
      show: (value) => `${bytes(value)}/s`,
    }),
    new Chart({
      title: "Time to first token",
      lines: ttft.map(([source, label]) => ({ label, ink: `source-${source}`, kind: "dots", value: (row) => row.ttft[source] ?? null })),
      show: (value) => (value ? milliseconds(value) : "0"),
    }),
    new Chart({
      title: "Decoding",
      lines: [{ label: "tokens a second", ink: "accent", kind: "dots", value: (row) => row.decode }],
      show: (value) => (value ? rate(value, "/s") : "0"),
    }),
    new Chart({
      title: "Cache fill",
      lines: [
        { label: "capacity", ink: "soft", kind: "line", value: (row) => row.cache_bytes_max },
        { label: "used", ink: "accent", kind: "line", value: (row) => row.cache_bytes_used },
      ],
      show: bytes,
    }),
  ];
}
