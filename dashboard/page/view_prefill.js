/** Prefill: the jobs that go on, those that ended, the counters. */

import { h } from "./dom.js";
import { NONE, bytes, clock, compact, count, duration, milliseconds, percent, rate } from "./format.js";
import { badge, empty, facts, name, progress, section, table } from "./parts.js";
import { aliasOf } from "./store.js";

export class PrefillView {
  title = "Prefill";
  topics = ["summary", "bus", "nodes", "jobs"];

  constructor(page) {
    this.page = page;
  }

  render(store) {
    const jobs = store.data.jobs;
    if (!jobs) return empty("Waiting for the dashboard");
    return [
      section("Live jobs", { note: jobs.active.length ? String(jobs.active.length) : undefined }, jobCards(store, jobs.active)),
      workers(store),
      section("Ended jobs", { note: jobs.ended.length ? `last ${jobs.ended.length}` : undefined }, jobs.ended.length ? ended(store, jobs.ended) : empty("No job has ended since this dashboard listens")),
      section("Counters", { note: "all nodes, since they are known" }, counters(store.data.summary?.prefill ?? {})),
    ];
  }
}

/** Jobs with their progress; those that wait, too. */
export function jobCards(store, jobs) {
  if (!jobs.length) return empty("No job runs", "A job begins when a prompt has to be computed.");
  return h("ul", { class: "jobs" }, jobs.map((job) => jobCard(store, job)));
}

function jobCard(store, job) {
  const where = aliasOf(store, job.node_id);
  const waits = job.state === "queued";
  return h(
    "li",
    { key: `${job.node_id} ${job.job_id}`, class: "job", "data-state": job.state },
    h(
      "div",
      { class: "job-head" },
      name(where, "strong"),
      job.place === "worker" && job.asker && h("span", { class: "soft" }, "for ", name(aliasOf(store, job.asker))),
      job.place === "primary" && h("span", { class: "soft" }, "for itself"),
      h("span", { class: "push" }, badge(job.state)),
    ),
    progress(job.progress, `Progress of a job on ${where}`),
    h(
      "div",
      { class: "job-foot" },
      h("span", { class: "number" }, `${percent(job.progress)}, ${count(job.tokens_done)} of ${count(job.tokens_total)} tokens`),
      h("span", { class: "number" }, job.tokens_per_second ? rate(job.tokens_per_second) : ""),
      h("span", { class: "number push" }, waits ? "waits" : eta(job)),
    ),
  );
}

function eta(job) {
  if (job.eta_ms) return `${job.eta_ms < 1000 ? "under 1 s" : duration(job.eta_ms / 1000)} left`;
  return job.elapsed_ms ? `for ${milliseconds(job.elapsed_ms)}` : "";
}

function workers(store) {
  const found = store.nodes.filter((node) => node.prefill_worker);
  if (!found.length) return null;
  return section(
    "Workers",
    { note: String(found.length) },
    table({
      caption: "Prefill workers",
      items: found,
      key: (node) => node.id,
      columns: [
        { head: "Worker", className: "title", cell: (node) => name(node.alias, "strong") },
        { head: "Status", cell: (node) => badge(node.status) },
        { head: "Running", number: true, cell: ({ prefill_worker: worker }) => `${worker.inflight_jobs} of ${worker.max_concurrent_jobs}` },
        { head: "Queued", number: true, cell: ({ prefill_worker: worker }) => (worker.queued_jobs ? `${worker.queued_jobs} (${count(worker.queued_tokens)} tokens)` : "0") },
        { head: "Load", number: true, cell: ({ prefill_worker: worker }) => percent(worker.load) },
        { head: "Speed", number: true, cell: ({ prefill_worker: worker }) => rate(worker.tokens_per_second) },
        { head: "Memory free", number: true, cell: ({ prefill_worker: worker }) => bytes(worker.ram_bytes_free) },
      ],
    }),
  );
}

function ended(store, jobs) {
  return table({
    caption: "Ended jobs",
    items: jobs,
    key: (job) => `${job.node_id} ${job.job_id}`,
    columns: [
      { head: "Ended", className: "title number-like", cell: (job) => clock(job.changed_at) },
      { head: "On", cell: (job) => name(aliasOf(store, job.node_id)) },
      { head: "For", cell: (job) => (job.place === "primary" ? "itself" : name(aliasOf(store, job.asker))) },
      { head: "State", cell: (job) => badge(job.state) },
      { head: "Tokens", number: true, cell: (job) => (job.tokens_done === job.tokens_total ? count(job.tokens_total) : `${count(job.tokens_done)} of ${count(job.tokens_total)}`) },
      { head: "Reused", number: true, cell: (job) => count(job.tokens_reused) },
      { head: "Took", number: true, cell: (job) => milliseconds(job.elapsed_ms) },
      { head: "Speed", number: true, cell: (job) => rate(job.tokens_per_second) },
      { head: "Reason", className: "text", cell: (job) => job.reason || job.reason_kind || NONE },
    ],
  });
}

function counters(prefill) {
  const figure = (label) => prefill[label] ?? 0;
  if (!Object.keys(prefill).length) return empty("No node has been heard yet");
  return h(
    "div",
    { class: "details" },
    facts([
      ["Local hits", compact(figure("local_hits"))],
      ["Remote hits", compact(figure("remote_hits"))],
      ["Misses", compact(figure("misses"))],
      ["Tokens reused", compact(figure("tokens_reused"))],
      ["Tokens computed", compact(figure("tokens_computed"))],
    ]),
    facts([
      ["Remote jobs", compact(figure("remote_jobs"))],
      ["Failed", compact(figure("remote_job_failures"))],
      ["Bytes received", bytes(figure("bytes_received"))],
      ["Fallbacks", compact(figure("fallbacks"))],
      ["Last fallback", figure("last_fallback_reason") || NONE],
    ]),
    facts([
      ["Publish attempts", compact(figure("publish_attempts"))],
      ["Succeeded", compact(figure("publish_successes"))],
      ["Failed", compact(figure("publish_failures"))],
      ["Bytes published", bytes(figure("bytes_published"))],
      ["Promoted to local", `${compact(figure("hot_promotions"))} (${bytes(figure("hot_promotion_bytes"))})`],
    ]),
  );
}
