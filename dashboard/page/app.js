/** The page: views as tabs, the live events, what is told about the connection. */

import { hasKey } from "./api.js";
import { h, render } from "./dom.js";
import { count, duration, visible } from "./format.js";
import { KeyDialog } from "./key.js";
import { Live } from "./live.js";
import { name } from "./parts.js";
import { Store } from "./store.js";
import { BenchmarksView } from "./view_benchmarks.js";
import { GroupsView } from "./view_groups.js";
import { KvView } from "./view_kv.js";
import { NodesView } from "./view_nodes.js";
import { OverviewView } from "./view_overview.js";
import { PrefillView } from "./view_prefill.js";
import { RegisterView } from "./view_register.js";
import { RequestsView } from "./view_requests.js";

const VIEWS = {
  overview: OverviewView,
  nodes: NodesView,
  groups: GroupsView,
  prefill: PrefillView,
  kv: KvView,
  requests: RequestsView,
  benchmarks: BenchmarksView,
  register: RegisterView,
};
const TITLE = "Kakeya Inference Network";
const TICK_MS = 1000;
/** A page that nobody looks at gives its place at the dashboard back. */
const HIDDEN_MS = 60_000;
const THEME_NAMES = { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const STATES = {
  connecting: "Connecting",
  live: "Live",
  waiting: "Waiting for nodes",
  silent: "Bus silent",
  polling: "Reading now and then",
  lost: "Dashboard away",
};

class Page {
  constructor() {
    this.store = new Store();
    this.views = Object.fromEntries(Object.entries(VIEWS).map(([id, View]) => [id, new View(this)]));
    this.current = "";
    this.scheduled = false;
    this.hiddenTimer = 0;
    this.live = new Live(
      (topic, data) => {
        this.store.take(topic, data);
        this.refresh();
      },
      (state, detail) => this.#connection(state, detail),
    );
    this.sections = this.#makeSections();
    this.key = new KeyDialog(element("key-dialog"), element("key-button"), () => this.#keyChanged());
    this.#installTheme();
    window.addEventListener("hashchange", () => this.#go(true));
    document.addEventListener("visibilitychange", () => this.#visibility());
    element("skip").addEventListener("click", (event) => this.#skip(event));
    setInterval(() => this.refresh(), TICK_MS);
    this.#go(false);
  }

  /** Draw with the next frame. */
  refresh() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.#draw();
    });
  }

  askForKey() {
    this.key.open();
  }

  get view() {
    return this.views[this.current];
  }

  #makeSections() {
    return Object.fromEntries(
      Object.keys(VIEWS).map((id) => {
        const section = document.createElement("div");
        section.id = `view-${id}`;
        section.className = "view";
        section.hidden = true;
        element("main").append(section);
        return [id, section];
      }),
    );
  }

  #go(byUser) {
    const wanted = location.hash.slice(1);
    const id = Object.hasOwn(VIEWS, wanted) ? wanted : "overview";
    if (id === this.current) return;
    this.current = id;
    for (const [each, section] of Object.entries(this.sections)) section.hidden = each !== id;
    document.title = `${this.view.title} · ${TITLE}`;
    this.live.open(this.view.topics);
    this.view.entered?.();
    this.#draw();
    this.#centreTab();
    if (byUser) {
      this.#focusHeading();
      scrollTo(0, 0);
    }
  }

  /** Scrolls the tabs only: scrollIntoView would also make the next Tab key go on from there in newer browsers. */
  #centreTab() {
    const tabs = document.querySelector("#tabs");
    const [row, tab] = [tabs, tabs.querySelector("[aria-current]")].map((each) => each.getBoundingClientRect());
    tabs.scrollLeft += tab.left + tab.width / 2 - (row.left + row.width / 2);
  }

  #focusHeading() {
    document.querySelector(`#view-${this.current} > h2`)?.focus({ preventScroll: true });
  }

  #skip(event) {
    event.preventDefault(); // The hash names the view; it must not change.
    this.#focusHeading();
  }

  #draw() {
    const store = this.store;
    render(element("tabs"), Object.entries(this.views).map(([id, view]) => this.#tab(id, view)));
    render(this.sections[this.current], h("h2", { tabindex: "-1", class: "unseen" }, this.view.title), this.view.render(store));
    const state = stateOf(store);
    element("state").dataset.state = state;
    setText("state-text", STATES[state]);
    render(element("banner"), bannerFor(state, store));
    document.body.dataset.state = state;
  }

  #tab(id, view) {
    const number = id === "prefill" ? this.#jobsActive() : 0;
    return h(
      "li",
      { key: id },
      h("a", { href: `#${id}`, "aria-current": id === this.current ? "page" : undefined }, view.title, number > 0 && h("span", { class: "tab-number" }, h("span", { class: "unseen" }, ", "), count(number))),
    );
  }

  /** The list of jobs is newer than the summary, where it is listened to. */
  #jobsActive() {
    const { jobs, summary } = this.store.data;
    return (this.view.topics.includes("jobs") ? jobs?.active.length : summary?.jobs_active) ?? 0;
  }

  #connection(state, detail) {
    if (this.store.connection === state && this.store.detail === detail) return;
    this.store.connection = state;
    this.store.detail = detail;
    this.refresh();
  }

  /** What the key shows is read anew; what it showed goes with it. */
  #keyChanged() {
    if (!hasKey()) this.store.data = {};
    this.live.open(this.view.topics);
    this.view.entered?.();
    this.refresh();
  }

  #visibility() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = setTimeout(() => this.live.close(), HIDDEN_MS);
    } else if (!this.live.abort) {
      this.live.open(this.view.topics);
      this.view.entered?.();
    }
  }

  #installTheme() {
    const button = element("theme-button");
    const label = () => (button.textContent = THEME_NAMES[window.kakeyaTheme.current]);
    label();
    button.onclick = () => {
      window.kakeyaTheme.next();
      label();
      for (const view of Object.values(this.views)) view.themeChanged?.();
    };
  }
}

function element(id) {
  return document.getElementById(id);
}

function setText(id, text) {
  const shown = visible(text);
  if (element(id).textContent !== shown) element(id).textContent = shown;
}

function stateOf(store) {
  if (store.connection === "connecting" || store.connection === "lost") return store.connection;
  const bus = store.data.bus?.state ?? store.data.summary?.bus ?? "connecting";
  return bus === "live" && store.connection === "polling" ? "polling" : bus;
}

/** What is wrong, in a sentence; nothing when all is well. Kept free of running seconds: screen readers read it aloud. */
function bannerFor(state, store) {
  const bus = store.data.bus;
  const stale = store.nodes.filter((node) => node.status === "stale");
  switch (state) {
    case "lost":
      return banner("bad", `No connection: ${store.detail}. `, store.heardAt ? `The figures below are old (${roughly(store.silentS)}). ` : "", "Trying again.");
    case "silent":
      return banner("warning", `The bus is silent: nothing was heard of any node for ${roughly(bus?.last_message_age_s ?? 0)}. What is shown is the last that was known.`);
    case "waiting":
      return banner("calm", refusedBuses(bus), "No node has been heard yet. Start a fleet with ", h("code", null, "kakeya up"), ", or tell the dashboard where one is: ", h("code", null, "kakeya dashboard --bus HOST:PORT"), ".");
    case "polling":
      return banner("calm", "Too many live readers: the figures are read every few seconds until there is a place for this page.");
    default:
      if (!stale.length) return null;
      return banner("warning", stale.length === 1 ? "Stale: " : `${stale.length} nodes are stale: `, stale.slice(0, 3).map((node, index) => [index > 0 && ", ", name(node.alias)]), stale.length > 3 && " and more", ". Nothing was heard for three intervals; figures of stale nodes are old.");
  }
}

/** Hint at another fleet's key: then no bus lets this dashboard in. */
function refusedBuses(bus) {
  return bus?.handshakes_rejected ? "A bus was found and refused this dashboard: is its telemetry key the fleet's? " : "";
}

/** In steps, so that the text changes rarely. */
function roughly(ageS) {
  if (ageS < 15) return "some seconds";
  return ageS < 60 ? "less than a minute" : `more than ${duration(Math.floor(ageS / 60) * 60)}`;
}

function banner(tone, ...text) {
  return h("p", { class: `banner ${tone}` }, text);
}

new Page();
