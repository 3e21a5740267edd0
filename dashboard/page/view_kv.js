/** The KV of the fleet: the namespace, its mounts, what moves and what has to go. */

import { h } from "./dom.js";
import { NONE, bytes, clock, count, milliseconds } from "./format.js";
import { badge, capacity, empty, facts, name, section, table } from "./parts.js";
import { aliasOf } from "./store.js";

export class KvView {
  title = "KV";
  topics = ["summary", "bus", "nodes", "kvfs", "transfers", "evictions"];

  constructor(page) {
    this.page = page;
  }

  render(store) {
    const kvfs = store.data.kvfs;
    if (!kvfs) return empty("Waiting for the dashboard");
    return [
      section(
        "Namespace",
        { note: `${count(kvfs.entry_count)} entries` },
        capacity(kvfs.bytes_used, kvfs.bytes_free, "All mounts"),
        facts([
          ["URI", h("code", { class: "uri" }, kvfs.uri)],
          ["Access", kvfs.access],
          ["Shared memory", kvfs.coherent_shared_memory ? "coherent" : "none: parts are copied, once"],
        ]),
        kvfs.namespaces.length > 1 && h("details", null, h("summary", null, `${kvfs.namespaces.length} models`), h("ul", { class: "plain" }, kvfs.namespaces.map((uri) => h("li", { key: uri }, h("code", { class: "uri" }, uri))))),
      ),
      section("Mounts", { note: String(kvfs.mounts.length) }, kvfs.mounts.length ? mounts(store, kvfs.mounts) : empty("Nothing is mounted", "Caches and workers are mounted as soon as they are heard.")),
      section("Transfers", totalNote(store.data.transfers), transfers(store)),
      section("Evictions", totalNote(store.data.evictions), evictions(store)),
    ];
  }
}

function totalNote(list) {
  return list?.total ? { note: `${count(list.total)} heard` } : {};
}

function mounts(store, items) {
  return table({
    caption: "Mounted caches",
    items,
    key: (mount) => mount.node_id,
    columns: [
      { head: "Node", className: "title", cell: (mount) => name(aliasOf(store, mount.node_id), "strong") },
      { head: "Tier", cell: (mount) => badge(mount.tier === "hot" ? "hot" : "cold", mount.tier === "hot" ? "busy" : "calm") },
      { head: "Network", cell: (mount) => name(mount.network) },
      { head: "Capacity", className: "bar", cell: (mount) => capacity(mount.bytes_used, mount.bytes_free, `Cache of ${aliasOf(store, mount.node_id)}`) },
      { head: "Entries", number: true, cell: (mount) => count(mount.entry_count) },
      { head: "Evicted", number: true, cell: (mount) => evicted(store, mount.node_id) },
      ...(items.some((mount) => mount.address) ? [{ head: "Address", cell: (mount) => mount.address }] : []),
    ],
  });
}

function evicted(store, id) {
  const cache = store.nodes.find((node) => node.id === id)?.cache;
  return cache ? `${count(cache.evictions)} (${bytes(cache.bytes_evicted)})` : NONE;
}

function transfers(store) {
  const items = store.data.transfers?.items ?? [];
  if (!items.length) return empty("Nothing has moved since this dashboard listens");
  return table({
    caption: "Bulk transfers, newest first",
    items: items.slice(0, 20),
    key: (transfer) => transfer.number,
    columns: [
      { head: "Time", className: "title number-like", cell: (transfer) => clock(transfer.at) },
      { head: "Node", cell: (transfer) => name(aliasOf(store, transfer.node_id)) },
      { head: "Way", cell: (transfer) => [transfer.direction === "in" ? "from " : "to ", name(aliasOf(store, transfer.peer))] },
      { head: "Purpose", cell: (transfer) => transfer.purpose },
      { head: "Parts", number: true, cell: (transfer) => count(transfer.parts) },
      { head: "Bytes", number: true, cell: (transfer) => bytes(transfer.payload_bytes) },
      { head: "Took", number: true, cell: (transfer) => milliseconds(transfer.elapsed_ms) },
      { head: "Speed", number: true, cell: (transfer) => (transfer.elapsed_ms ? `${bytes((transfer.payload_bytes * 1000) / transfer.elapsed_ms)}/s` : NONE) },
      { head: "Result", className: "text", cell: (transfer) => (transfer.ok ? badge("done", "good") : [badge("failed"), h("span", { class: "soft under" }, transfer.reason || transfer.reason_kind)]) },
    ],
  });
}

function evictions(store) {
  const items = store.data.evictions?.items ?? [];
  if (!items.length) return empty("No store had to evict anything since this dashboard listens");
  return table({
    caption: "Evictions, newest first",
    items: items.slice(0, 20),
    key: (eviction) => eviction.number,
    columns: [
      { head: "Time", className: "title number-like", cell: (eviction) => clock(eviction.at) },
      { head: "Node", cell: (eviction) => name(aliasOf(store, eviction.node_id)) },
      { head: "Parts", number: true, cell: (eviction) => count(eviction.parts) },
      { head: "Bytes", number: true, cell: (eviction) => bytes(eviction.size_bytes) },
      { head: "Store then", className: "bar", cell: (eviction) => capacity(eviction.bytes_used, Math.max(0, eviction.max_bytes - eviction.bytes_used), "Store") },
    ],
  });
}
