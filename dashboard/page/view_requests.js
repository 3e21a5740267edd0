/** The explain records: where each prompt's KV came from, what it cost, and why it was not better. */

import { h } from "./dom.js";
import { NONE, bytes, clock, count, milliseconds, percent, rate } from "./format.js";
import { SOURCE_NAMES, badge, empty, facts, name, section, sourceBadge, table } from "./parts.js";
import { aliasOf } from "./store.js";

export class RequestsView {
  title = "Requests";
  topics = ["summary", "bus", "nodes", "requests", "security"];

  constructor(page) {
    this.page = page;
    this.opened = new Set();
  }

  render(store) {
    const requests = store.data.requests;
    if (!requests) return empty("Waiting for the dashboard");
    return [
      section(
        "Requests",
        { note: requests.total ? `last ${requests.items.length}` : undefined },
        requests.items.length ? this.#table(store, requests.items) : empty("No request yet", "Ask something with ", h("code", null, "kakeya chat"), "."),
      ),
      section("Refusals and arrivals", { note: store.data.security ? `${count(store.data.security.refusals_total)} refused` : undefined }, security(store)),
    ];
  }

  #table(store, items) {
    return table({
      caption: "Requests, newest first",
      items,
      key: (request) => `${request.node_id} ${request.request_id} ${request.operation}`,
      opened: this.opened,
      refresh: () => this.page.refresh(),
      describe: (request) => `${request.operation} at ${clock(request.at)}`,
      detail: (request) => detail(store, request),
      columns: [
        { head: "Time", className: "title number-like", cell: (request) => clock(request.at) },
        { head: "Node", cell: (request) => name(aliasOf(store, request.node_id)) },
        { head: "Request", cell: (request) => request.operation },
        { head: "Source", cell: (request) => sourceBadge(request.source) },
        { head: "Reused / tokens", className: "bar", cell: boundary },
        { head: "Bytes", number: true, cell: (request) => (request.transfer_bytes ? bytes(request.transfer_bytes) : NONE) },
        { head: "Took", number: true, cell: (request) => milliseconds(request.elapsed_ms) },
        { head: "First token", number: true, cell: (request) => milliseconds(request.ttft_ms) },
        { head: "Decoding", number: true, cell: (request) => rate(request.decode_tokens_per_second) },
        { head: "Outcome", cell: (request) => badge(request.outcome) },
        { head: "Reason", className: "text", cell: reason },
      ],
    });
  }
}

function boundary(request) {
  if (request.operation !== "append") return request.generated_tokens ? `${count(request.generated_tokens)} generated` : NONE;
  return h(
    "div",
    { class: "capacity" },
    stretches(request),
    h("span", { class: "capacity-text" }, `${count(request.boundary)} / ${count(request.prompt_tokens)}`),
  );
}

/** The prompt as a bar, each stretch in the colour of its source. */
function stretches(request) {
  const total = request.prompt_tokens || 1;
  // Empty ones are nodes that sent something and that no stretch is named after.
  const found = request.sources.filter((source) => source.end > source.start);
  const words = found.map((source) => `${SOURCE_NAMES[source.kind] ?? source.kind} ${source.start} to ${source.end}`).join(", ");
  return h(
    "div",
    { class: "meter stretches", role: "img", "aria-label": words || `${percent(request.boundary / total)} reused` },
    found.map((source) => h("div", { class: `fill source-${source.kind}`, style: { width: `${(((source.end - source.start) / total) * 100).toFixed(2)}%` } })),
  );
}

/** In few words; the details have the whole. */
function reason(request) {
  return request.reason_kinds.length ? request.reason_kinds.join(", ") : NONE;
}

function detail(store, request) {
  return h(
    "div",
    { class: "details" },
    facts([
      ["Prompt", `${count(request.prompt_tokens)} tokens`],
      ["Reused up to", `token ${count(request.boundary)}`],
      ["Differs from the cache at", request.diverged_at === null ? "" : `token ${count(request.diverged_at)}`],
      ["Generated", request.generated_tokens ? `${count(request.generated_tokens)} tokens` : ""],
      ["Ended by", request.stop_reason],
      ["Request", h("code", null, request.request_id)],
    ]),
    request.sources.length > 0 && sources(store, request.sources),
    request.decisions.length > 0 && decisions(request.decisions),
    h("div", null, h("h4", null, "Why not better"), h("ul", { class: "plain" }, reasonItems(request))),
  );
}

function reasonItems(request) {
  const found = request.reasons.length ? request.reasons : request.reason_kinds;
  return found.length ? found.map((text, index) => h("li", { key: index }, text)) : [h("li", { class: "soft" }, "nothing stood in the way")];
}

function sources(store, items) {
  return h(
    "div",
    null,
    h("h4", null, "Where it came from"),
    h(
      "ul",
      { class: "plain" },
      items.map((source, index) =>
        h(
          "li",
          { key: index },
          sourceBadge(source.kind),
          source.end > source.start ? ` tokens ${count(source.start)} to ${count(source.end)}` : " besides",
          source.node_id && [" from ", name(aliasOf(store, source.node_id))],
          source.transfer_bytes > 0 && `, ${bytes(source.transfer_bytes)}`,
          source.elapsed_ms > 0 && `, ${milliseconds(source.elapsed_ms)}`,
        ),
      ),
    ),
  );
}

function decisions(items) {
  return h(
    "div",
    null,
    h("h4", null, "What was weighed"),
    items.map((decision, index) =>
      h(
        "div",
        { key: index, class: "decision" },
        h("p", null, `${decision.what}: `, h("strong", null, decision.chosen || NONE), decision.text && h("span", { class: "soft" }, ` ${decision.text}`)),
        facts(
          Object.entries(decision.costs_ms).map(([option, cost]) => [option, milliseconds(cost)]),
          "tight",
        ),
      ),
    ),
  );
}

function security(store) {
  const found = store.data.security;
  const kinds = Object.entries(found?.kinds ?? {});
  if (!kinds.length) return empty("Nothing was refused since this dashboard listens");
  return [
    h("ul", { class: "chips" }, kinds.map(([kind, number]) => h("li", { key: kind }, `${kind.replaceAll("_", " ")} `, h("strong", null, count(number))))),
    found.items.length > 0 &&
      table({
        caption: "Security events, newest first",
        items: found.items.slice(0, 20),
        key: (item) => item.number,
        columns: [
          { head: "Time", className: "title number-like", cell: (item) => clock(item.at) },
          { head: "Node", cell: (item) => name(item.node_id) },
          { head: "Kind", cell: (item) => item.kind.replaceAll("_", " ") },
          { head: "Subject", cell: (item) => name(item.subject) },
          { head: "Times", number: true, cell: (item) => count(item.count) },
          { head: "Text", className: "text", cell: (item) => item.text },
        ],
      }),
  ];
}
