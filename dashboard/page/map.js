/** The fleet as a map: primaries in the middle, the others round them; lines carry the jobs that go on. */

import { h } from "./dom.js";
import { empty, name } from "./parts.js";

const LABELS_MAX = 24;
/** Share of the box; the rest is for labels. */
const RADIUS_X = 38;
const RADIUS_Y = 36;

export function fleetMap(store) {
  const nodes = store.nodes;
  if (!nodes.length) return empty("No node yet", "Start a fleet with ", h("code", null, "kakeya up"), " or register a node.");
  const places = layout(nodes);
  const labelled = nodes.length <= LABELS_MAX;
  return h(
    "div",
    { class: `map ${labelled ? (nodes.length <= 3 ? "few" : "") : "many"}`.trim(), role: "img", "aria-label": inWords(nodes) },
    h("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, spokes(store, places)),
    nodes.map((node) => {
      const [x, y] = places.get(node.id);
      return h(
        "div",
        { key: node.id, class: `spot ${node.status} ${isHead(node) ? "head" : ""}`, style: { left: `${x}%`, top: `${y}%` }, title: `${node.alias}: ${node.status}` },
        h("span", { class: "mark" }),
        labelled && h("span", { class: "label" }, name(node.alias), h("span", { class: "soft" }, node.status === "online" ? name(node.region) : node.status)),
      );
    }),
  );
}

function isHead(node) {
  return node.roles.includes("primary") || node.role === "head";
}

function inWords(nodes) {
  const counts = new Map();
  for (const node of nodes) counts.set(node.status, (counts.get(node.status) ?? 0) + 1);
  return `Map of ${nodes.length} nodes: ${[...counts].map(([status, number]) => `${number} ${status}`).join(", ")}`;
}

/** id -> [x, y] in percent of the box. */
function layout(nodes) {
  const heads = nodes.filter(isHead);
  const others = nodes.filter((node) => !isHead(node));
  const places = new Map();
  if (!others.length) return new Map(heads.map((node, index) => [node.id, onEllipse(index, heads.length, heads.length > 1 ? 1 : 0)]));
  heads.forEach((node, index) => places.set(node.id, onEllipse(index, heads.length, heads.length > 1 ? 0.3 : 0)));
  others.forEach((node, index) => places.set(node.id, onEllipse(index, others.length, 1)));
  return places;
}

function onEllipse(index, number, scale) {
  // Two stand left and right; from there on round, the first above left.
  const angle = Math.PI + (index / number) * 2 * Math.PI + (number > 2 ? Math.PI / number : 0);
  return [50 + RADIUS_X * scale * Math.cos(angle), 47 + RADIUS_Y * scale * Math.sin(angle)];
}

function spokes(store, places) {
  const busy = new Set((store.data.jobs?.active ?? []).filter((job) => job.asker).map((job) => `${job.asker} ${job.node_id}`));
  const heads = store.nodes.filter(isHead);
  const others = store.nodes.filter((node) => !isHead(node));
  return heads.flatMap((head) =>
    others.map((node) => {
      const [x1, y1] = places.get(head.id);
      const [x2, y2] = places.get(node.id);
      const state = busy.has(`${head.id} ${node.id}`) ? "busy" : node.status === "online" ? "" : "away";
      return h("line", { key: `${head.id} ${node.id}`, x1, y1, x2, y2, class: `spoke ${state}` });
    }),
  );
}
