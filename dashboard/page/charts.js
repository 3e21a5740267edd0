/** Time series: buckets of the API made into what uPlot draws, in the page's colours. */

import uPlot from "./uPlot.esm.js";
import { h } from "./dom.js";
import { NONE } from "./format.js";

const HEIGHT_PX = 132;
const BUCKETS_MAX = 90;
const SPAN_MIN_S = 120;
const FONT = '11px system-ui, -apple-system, "Segoe UI", sans-serif';
const SUMS = ["tokens_reused", "tokens_computed", "tokens_generated", "bytes_moved", "bytes_evicted", "transfers", "requests", "refusals"];
const STATES = ["cache_bytes_used", "cache_bytes_max", "nodes_online", "jobs_active"];

/** A colour of the style sheet as the canvas needs it, in the present theme. */
function ink(name) {
  let probe = document.getElementById("ink-probe");
  if (!probe) {
    probe = document.createElement("span");
    probe.id = "ink-probe";
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.setProperty("color", `var(--${name})`);
  return getComputedStyle(probe).color;
}

/**
 * Buckets of the last `spanS` seconds, several joined into one so that a chart has at most 90. Sums add up, states are the
 * last, means are averaged.
 */
export function condense(series, spanS) {
  const points = series.points;
  if (points.length === 0) return { step_s: series.step_s, rows: [] };
  const last = points.at(-1);
  const inside = points.filter((point) => point.index > last.index - spanS / series.step_s);
  const joined = Math.max(1, Math.ceil((last.index - inside[0].index + 1) / BUCKETS_MAX));
  const groups = new Map();
  for (const point of inside) {
    const slot = Math.floor(point.index / joined);
    if (!groups.has(slot)) groups.set(slot, []);
    groups.get(slot).push(point);
  }
  const origin = last.at - last.index * series.step_s;
  const stepS = series.step_s * joined;
  const rows = [];
  for (let slot = Math.floor(inside[0].index / joined); slot <= Math.floor(last.index / joined); slot += 1) {
    rows.push(joinPoints(origin + slot * stepS, stepS, groups.get(slot) ?? []));
  }
  return { step_s: stepS, rows };
}

function joinPoints(at, stepS, points) {
  const row = { at, step_s: stepS, known: points.length > 0 };
  for (const name of SUMS) row[name] = points.reduce((sum, point) => sum + point[name], 0);
  for (const name of STATES) row[name] = points.findLast((point) => point[name] !== null)?.[name] ?? null;
  const prompt = row.tokens_reused + row.tokens_computed;
  row.hit_rate = prompt ? row.tokens_reused / prompt : null;
  row.decode = mean(points.map((point) => point.decode_tokens_per_second));
  row.ttft = {};
  for (const source of new Set(points.flatMap((point) => Object.keys(point.ttft_ms)))) {
    row.ttft[source] = mean(points.map((point) => point.ttft_ms[source] ?? null));
  }
  return row;
}

function mean(values) {
  const present = values.filter((value) => value !== null);
  return present.length ? present.reduce((sum, value) => sum + value, 0) / present.length : null;
}

/**
 * One chart with its heading and legend. `lines`: `{label, ink, value(row), kind: "line" | "bars" | "dots"}`, drawn in this
 * order; `show(value)` makes the text of a value; `top`: fixed end of the scale.
 */
export class Chart {
  constructor({ title, lines, show, top }) {
    this.title = title;
    this.lines = lines;
    this.show = show;
    this.top = top;
    this.plot = null;
    this.rows = [];
    this.hovered = null;
    this.onHover = () => {};
    this.mount = (element) => this.#mount(element);
  }

  /** The chart over these rows of condense(). */
  view(condensed) {
    if (this.rows !== condensed.rows) {
      this.rows = condensed.rows;
      this.#draw();
    }
    const row = this.rows[this.hovered ?? -1];
    return h(
      "figure",
      { class: "chart", key: this.title },
      h("figcaption", null, h("h3", null, this.title), h("dl", { class: "legend" }, this.#listed().map((line) => this.#legend(line, row)))),
      h("div", { class: "plot", role: "img", "aria-label": this.#inWords(), mount: this.mount }),
      this.#isEmpty() && h("p", { class: "no-data" }, "Nothing measured yet"),
    );
  }

  /** Of many lines only those that have something to show. */
  #listed() {
    return this.lines.length > 2 ? this.lines.filter((line) => this.#known(line).length) : this.lines;
  }

  #legend(line, row) {
    const value = row ? line.value(row) : (this.#known(line).at(-1) ?? null);
    return h(
      "div",
      null,
      h("dt", null, h("span", { class: `swatch ${line.ink}`, "aria-hidden": "true" }), line.label),
      h("dd", null, value === null ? NONE : this.show(value)),
    );
  }

  #known(line) {
    return this.rows.filter((row) => row.known).map((row) => line.value(row)).filter((value) => value !== null);
  }

  #isEmpty() {
    return this.lines.every((line) => this.#known(line).length === 0);
  }

  #inWords() {
    const parts = this.lines.map((line) => {
      const values = this.#known(line);
      if (!values.length) return `${line.label}: nothing yet`;
      return `${line.label}: now ${this.show(values.at(-1))}, between ${this.show(Math.min(...values))} and ${this.show(Math.max(...values))}`;
    });
    return `${this.title}. ${parts.join(". ")}.`;
  }

  #mount(element) {
    this.plot = new uPlot(this.#options(element.clientWidth || 300), this.#columns(), element);
    new ResizeObserver(() => {
      const width = Math.floor(element.clientWidth);
      if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT_PX });
    }).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  /** Draw again, in the present theme. */
  redraw() {
    this.plot?.redraw(false, true);
  }

  #draw() {
    this.plot?.setData(this.#columns());
  }

  #columns() {
    return [this.rows.map((row) => row.at), ...this.lines.map((line) => this.rows.map((row) => (row.known ? line.value(row) : null)))];
  }

  #options(width) {
    const grid = { stroke: () => ink("line"), width: 1 };
    const axis = { stroke: () => ink("soft"), font: FONT, grid, ticks: { show: false } };
    return {
      width,
      height: HEIGHT_PX,
      padding: [8, 6, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "kakeya" }, points: { size: 6 } },
      scales: { x: { range: (_, low, high) => timeRange(low, high) }, y: { range: (_, low, high) => [0, this.top ?? (high > 0 ? high * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 24, space: 64, values: (_, ticks) => ticks.map(timeTick) },
        { ...axis, size: 66, space: 30, values: (_, ticks) => ticks.map((tick) => this.show(tick)) },
      ],
      series: [{}, ...this.lines.map(drawn)],
      hooks: {
        setCursor: [
          (plot) => {
            const hovered = plot.cursor.left >= 0 ? (plot.cursor.idx ?? null) : null;
            if (hovered === this.hovered) return;
            this.hovered = hovered;
            this.onHover();
          },
        ],
      },
    };
  }
}

function timeRange(low, high) {
  return low === null ? [0, SPAN_MIN_S] : [Math.min(low, high - SPAN_MIN_S), high];
}

function timeTick(epochS) {
  const at = new Date(epochS * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}${at.getSeconds() ? `:${two(at.getSeconds())}` : ""}`;
}

function drawn(line) {
  const stroke = () => ink(line.ink);
  switch (line.kind) {
    case "bars":
      return { stroke, fill: stroke, width: 0, paths: uPlot.paths.bars({ size: [0.8, 12] }), points: { show: false } };
    case "dots":
      return { stroke, width: 1.5, spanGaps: true, points: { show: true, size: 5, fill: stroke } };
    default:
      return { stroke, width: 1.5, spanGaps: true, points: { show: false } };
  }
}
