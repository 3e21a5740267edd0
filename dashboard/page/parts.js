/** Pieces that several views are made of. */

import { h } from "./dom.js";
import { NONE, bytes, percent } from "./format.js";

/** Text that came from outside: isolated, so that right-to-left text turns nothing else round; cut off with its whole as title. */
export function name(text, className = "") {
  return text ? h("bdi", { class: `name ${className}`.trim(), title: text }, text) : NONE;
}

export function section(title, { note, tools, className = "", key } = {}, ...children) {
  return h(
    "section",
    { class: `card ${className}`.trim(), key },
    h("header", { class: "card-head" }, h("h3", null, title), note && h("span", { class: "note" }, note), tools && h("div", { class: "card-tools" }, tools)),
    children,
  );
}

export function empty(title, ...more) {
  return h("div", { class: "empty" }, h("p", null, title), more.length > 0 && h("p", { class: "soft" }, more));
}

export function tile(label, value, note, tone = "") {
  return h(
    "div",
    { class: `tile ${tone}`.trim(), key: label },
    h("dt", null, label),
    h("dd", null, h("span", { class: "value" }, value), note && h("span", { class: "tile-note" }, note)),
  );
}

const STATUS_TONES = {
  online: "good",
  completed: "good",
  ready: "good",
  running: "busy",
  queued: "calm",
  stale: "warning",
  pending: "calm",
  offline: "calm",
  cancelled: "calm",
  lost: "warning",
  unavailable: "warning",
  failed: "bad",
};

/** A state as a word with a coloured mark; never by colour alone. */
export function badge(text, tone = STATUS_TONES[text] ?? "calm") {
  return h("span", { class: `badge ${tone}` }, h("span", { class: "dot", "aria-hidden": "true" }), text);
}

export const SOURCE_NAMES = {
  computed: "computed",
  hot: "local cache",
  remote_cache: "cache peer",
  worker: "worker",
  live: "same session",
  other: "other",
};

export function sourceBadge(kind) {
  if (!kind) return NONE;
  return h("span", { class: "source" }, h("span", { class: `swatch source-${kind}`, "aria-hidden": "true" }), SOURCE_NAMES[kind] ?? kind);
}

/** A bar of a share with a label for those who don't see it. */
export function meter(ratio, label, className = "") {
  const share = Math.min(1, Math.max(0, ratio || 0));
  return h(
    "div",
    { class: `meter ${className}`.trim(), role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": Math.round(share * 100) },
    h("div", { class: "fill", style: { width: `${(share * 100).toFixed(1)}%` } }),
  );
}

export function progress(ratio, label) {
  const share = Math.min(1, Math.max(0, ratio || 0));
  return h(
    "div",
    { class: "meter progress", role: "progressbar", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": Math.round(share * 100) },
    h("div", { class: "fill", style: { width: `${(share * 100).toFixed(1)}%` } }),
  );
}

/** Used of used + free. */
export function capacity(used, free, label) {
  const total = used + free;
  const ratio = total ? used / total : 0;
  return h(
    "div",
    { class: "capacity" },
    meter(ratio, `${label}: ${percent(ratio)} used`, ratio > 0.95 ? "full" : ""),
    h("span", { class: "capacity-text" }, `${bytes(used)} of ${bytes(total)}`),
  );
}

/**
 * A table that becomes a list of cards on a narrow screen. Columns: `{head, cell(item), number, className}`. `detail(item)`:
 * what a row shows when its button is pressed; `opened`: a Set of the keys of such rows.
 */
export function table({ caption, columns, items, key, detail, opened, refresh, describe }) {
  const heads = columns.map((column) => h("th", { role: "columnheader", scope: "col", class: column.number && "number" }, column.head));
  if (detail) heads.push(h("th", { role: "columnheader", scope: "col", class: "more" }, h("span", { class: "unseen" }, "Details")));
  const rows = items.flatMap((item) => {
    const id = String(key(item));
    const open = Boolean(detail) && opened.has(id);
    const cells = columns.map((column) => tableCell(column, column.cell(item)));
    if (detail) cells.push(h("td", { role: "cell", class: "more" }, moreButton(id, open, opened, refresh, describe(item))));
    const row = h("tr", { role: "row", key: id, class: open ? "open" : undefined }, cells);
    const more = open && h("tr", { role: "row", key: `${id} detail`, class: "detail" }, h("td", { role: "cell", colspan: columns.length + 1 }, detail(item)));
    return more ? [row, more] : [row];
  });
  return h(
    "table",
    { role: "table" },
    h("caption", { class: "unseen" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
    h("tbody", { role: "rowgroup" }, rows),
  );
}

function tableCell(column, content) {
  const classes = [column.number && "number", column.className, content === NONE && "none"].filter(Boolean);
  return h("td", { role: "cell", class: classes.length ? classes.join(" ") : undefined, "data-label": column.head }, content);
}

function moreButton(id, open, opened, refresh, what) {
  return h(
    "button",
    {
      type: "button",
      class: "quiet small",
      "aria-expanded": open ? "true" : "false",
      "aria-label": `${open ? "Less" : "More"} about ${what}`,
      onclick: () => {
        if (open) opened.delete(id);
        else opened.add(id);
        refresh();
      },
    },
    open ? "Less" : "More",
  );
}

/** Label and value pairs; pairs without a value are left out. */
export function facts(pairs, className = "") {
  return h(
    "dl",
    { class: `facts ${className}`.trim() },
    pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([label, value]) => h("div", { key: label }, h("dt", null, label), h("dd", null, value))),
  );
}

export function field(id, label, props, hint) {
  return h(
    "div",
    { class: "field", key: id },
    h("label", { for: id }, label),
    h("input", { id, name: id, autocomplete: "off", spellcheck: "false", "aria-describedby": hint ? `${id}-hint` : undefined, ...props }),
    hint && h("p", { class: "hint", id: `${id}-hint` }, hint),
  );
}

export function message(tone, ...text) {
  return h("p", { class: `message ${tone}`, role: tone === "bad" ? "alert" : "status" }, text);
}
