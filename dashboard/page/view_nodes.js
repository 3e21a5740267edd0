/** Every node that is heard or registered. */

import { h } from "./dom.js";
import { NONE, bytes, count, duration, milliseconds, percent, rate } from "./format.js";
import { badge, capacity, empty, facts, name, section, table } from "./parts.js";

export class NodesView {
  title = "Nodes";
  topics = ["summary", "bus", "nodes"];

  constructor(page) {
    this.page = page;
    this.opened = new Set();
    this.wanted = "";
  }

  render(store) {
    const nodes = store.data.nodes;
    if (!nodes) return empty("Waiting for the dashboard");
    const shown = nodes.filter((node) => this.#fits(node));
    return [
      section(
        "Nodes",
        { note: this.wanted ? `${shown.length} of ${nodes.length}` : String(nodes.length), tools: this.#search() },
        shown.length ? this.#table(shown) : nodes.length ? empty("No node fits the filter") : empty("No node yet", "Start one with ", h("code", null, "kakeya up"), ", or register one first."),
      ),
      unheard(store.data.bus),
    ];
  }

  #fits(node) {
    const text = [node.alias, node.id, node.region, node.role, node.status, ...node.roles, ...node.models.map((model) => model.model_id)].join(" ");
    return text.toLowerCase().includes(this.wanted);
  }

  #search() {
    return h("input", {
      type: "search",
      class: "search",
      id: "node-filter",
      "aria-label": "Filter nodes",
      placeholder: "Filter",
      oninput: (event) => {
        this.wanted = event.target.value.trim().toLowerCase();
        this.page.refresh();
      },
    });
  }

  #table(nodes) {
    return table({
      caption: "Nodes",
      items: nodes,
      key: (node) => node.id,
      opened: this.opened,
      refresh: () => this.page.refresh(),
      describe: (node) => node.alias,
      detail,
      columns: [
        { head: "Node", className: "title", cell: (node) => [name(node.alias, "strong"), node.id !== node.alias && h("span", { class: "soft under" }, name(node.id))] },
        { head: "Role", cell: (node) => h("span", null, roles(node)) },
        { head: "Region", cell: (node) => name(node.region) },
        { head: "Model / cache format", className: "model", cell: model },
        { head: "Cache", className: "bar", cell: (node) => (node.cache ? capacity(node.cache.bytes_used, node.cache.bytes_free, `Cache of ${node.alias}`) : NONE) },
        { head: "Link", cell: link },
        { head: "Status", cell: status },
      ],
    });
  }
}

function roles(node) {
  return node.roles.length ? node.roles.join(", ") : node.role;
}

function model(node) {
  const first = node.models[0];
  if (!first) return NONE;
  return [name(first.model_id), h("span", { class: "soft under" }, name(node.cache?.format || first.quantization))];
}

function link(node) {
  return [h("span", null, name(node.endpoint.network)), node.endpoint.rtt_ms > 0 && h("span", { class: "soft under" }, milliseconds(node.endpoint.rtt_ms))];
}

function status(node) {
  const silent = node.status === "stale" && h("span", { class: "soft under" }, `silent for ${duration(node.silent_s)}`);
  return [badge(node.status), silent];
}

function detail(node) {
  const worker = node.prefill_worker;
  return h(
    "div",
    { class: "details" },
    facts([
      ["Node id", name(node.id)],
      ["State", node.state],
      ["Paired", node.paired ? "yes, its key is bound" : "no"],
      ["Address", node.endpoint.address],
      ["Software", node.software],
      ["Platform", node.platform],
      ["Memory", node.memory_bytes ? bytes(node.memory_bytes) : ""],
      ["Running for", node.uptime_s ? duration(node.uptime_s) : ""],
      ["Restarts seen", count(node.restarts)],
    ]),
    node.cache &&
      facts([
        ["Cache entries", count(node.cache.entry_count)],
        ["Tokens served", count(node.cache.tokens_served)],
        ["Evictions", `${count(node.cache.evictions)} (${bytes(node.cache.bytes_evicted)})`],
        ["Refused writes", count(node.cache.put_failures)],
        ["Epoch", count(node.cache.epoch)],
      ]),
    worker &&
      facts([
        ["Worker load", percent(worker.load)],
        ["Jobs", `${worker.inflight_jobs} running, ${worker.queued_jobs} queued`],
        ["Tokens queued", count(worker.queued_tokens)],
        ["Prefill speed", rate(worker.tokens_per_second)],
        ["Memory free", bytes(worker.ram_bytes_free)],
      ]),
    node.models.length > 1 && facts(node.models.map((each) => [each.role || "model", name(each.model_id)])),
  );
}

function unheard(bus) {
  if (!bus?.unheard.length) return null;
  const refused = bus.handshakes_rejected;
  return section(
    "Known to others, not heard here",
    { note: String(bus.unheard.length) },
    h("p", { class: "soft" }, "Their buses could not be reached. A fixed bus port (--bus-bind) and --bus help."),
    refused > 0 && h("p", { class: "soft" }, "Handshakes that were refused: ", count(refused), ". The telemetry key must be the fleet's."),
    h("ul", { class: "chips" }, bus.unheard.map((peer) => h("li", { key: peer.node_id }, name(peer.node_id), h("span", { class: "soft" }, ` ${peer.roles.join(", ")}`)))),
  );
}
