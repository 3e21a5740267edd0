/** What the page knows: the newest data of every topic, and the time series. */

const POINTS_MAX = 720;

export class Store {
  constructor() {
    this.data = {};
    this.connection = "connecting";
    this.detail = "";
    this.heardAt = 0;
    this.series = { fine: { step_s: 5, points: [] }, coarse: { step_s: 300, points: [] } };
  }

  /** Take in an event of a topic. */
  take(topic, data) {
    this.heardAt = performance.now();
    if (topic === "series") this.mergeSeries("fine", data);
    else this.data[topic] = data;
  }

  /** Points told again replace those of the same index. */
  mergeSeries(resolution, series) {
    const points = new Map(this.series[resolution].points.map((point) => [point.index, point]));
    for (const point of series.points) points.set(point.index, point);
    const sorted = [...points.values()].sort((a, b) => a.index - b.index).slice(-POINTS_MAX);
    this.series[resolution] = { step_s: series.step_s, points: sorted };
  }

  /** Seconds since anything came from the dashboard. */
  get silentS() {
    return this.heardAt ? (performance.now() - this.heardAt) / 1000 : null;
  }

  get nodes() {
    return this.data.nodes ?? [];
  }
}

/** The name a node is shown by. */
export function aliasOf(store, id) {
  if (!id) return "";
  return store.nodes.find((node) => node.id === id)?.alias ?? id;
}
