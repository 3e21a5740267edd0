/**
 * Live events. Read with fetch, because an EventSource cannot send the API key. Connects again by itself, first at once and
 * then ever more slowly. While the dashboard has no place for another reader, the routes of the topics are read instead.
 */

import { Refused, get, keyHeaders, reasonOf } from "./api.js";

const WAIT_FIRST_MS = 500;
const WAIT_MAX_MS = 8000;
/** The dashboard sends a summary every 5 s: after three missed ones the connection is taken for dead. */
const SILENCE_MS = 16_000;
/** Between two reads of the routes; before each, a place is asked for again. */
const POLL_MS = 5000;
const NO_PLACE = 503;

export class Live {
  /** `onEvent(topic, data)`; `onState("live" | "polling" | "lost", detail)`. */
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.abort = null;
    this.timer = 0;
    this.wait = WAIT_FIRST_MS;
  }

  /** Listen to these topics, instead of those before. */
  open(topics) {
    this.close();
    const abort = new AbortController();
    this.abort = abort;
    this.#read(topics, abort).then(
      () => this.#again(topics, abort, "the connection ended"),
      (error) => (error.status === NO_PLACE ? this.#poll(topics, abort, error.message) : this.#again(topics, abort, reasonOf(error))),
    );
  }

  /** Read every topic once by its route, then ask for a place again. */
  async #poll(topics, abort, detail) {
    try {
      for (const topic of topics) {
        const data = await get(routeOf(topic));
        if (this.abort !== abort) return;
        this.onEvent(topic, data);
      }
    } catch (error) {
      this.#again(topics, abort, reasonOf(error));
      return;
    }
    if (this.abort !== abort) return;
    this.onState("polling", detail);
    this.timer = setTimeout(() => this.open(topics), POLL_MS);
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  #again(topics, abort, detail) {
    if (this.abort !== abort) return; // Closed, or opened anew.
    this.onState("lost", detail);
    this.timer = setTimeout(() => this.open(topics), this.wait);
    this.wait = Math.min(WAIT_MAX_MS, this.wait * 2);
  }

  async #read(topics, abort) {
    const alive = watchdog(SILENCE_MS, () => abort.abort());
    try {
      const response = await fetch(`v1/network/events?topics=${topics.join(",")}`, {
        headers: keyHeaders(),
        cache: "no-store",
        credentials: "omit",
        signal: abort.signal,
      });
      if (!response.ok) throw new Refused(response.status, (await response.json().catch(() => null))?.detail ?? "refused");
      const parser = new EventParser((topic, data) => {
        if (this.abort !== abort) return;
        this.wait = WAIT_FIRST_MS;
        this.onState("live", "");
        this.onEvent(topic, data);
      });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        alive.feed();
        parser.take(value);
      }
    } finally {
      alive.stop();
    }
  }
}

function routeOf(topic) {
  return `v1/network/${topic === "benchmarks" ? "benchmarks/live" : topic}`;
}

function watchdog(limitMs, act) {
  let timer = setTimeout(act, limitMs);
  const stop = () => clearTimeout(timer);
  return {
    stop,
    feed() {
      stop();
      timer = setTimeout(act, limitMs);
    },
  };
}

/** Cuts text/event-stream into events; the dashboard's events are one data line of JSON each. */
export class EventParser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.rest = "";
  }

  take(text) {
    const blocks = (this.rest + text).split("\n\n");
    this.rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((each) => each.startsWith("data: "));
      if (!line) continue; // A comment that keeps the connection open, or the retry time.
      const event = JSON.parse(line.slice("data: ".length));
      this.onEvent(event.type, event.data);
    }
  }
}
