/** Groups of nodes, and making one. */

import { call, hasKey, reasonOf } from "./api.js";
import { h } from "./dom.js";
import { badge, empty, field, message, name, section } from "./parts.js";

export class GroupsView {
  title = "Groups";
  topics = ["summary", "bus", "nodes", "groups"];

  constructor(page) {
    this.page = page;
    this.outcome = null;
  }

  render(store) {
    const groups = store.data.groups;
    return [
      !groups ? empty("Waiting for the dashboard") : groups.length ? h("ul", { class: "cards" }, groups.map(groupCard)) : section("Groups", {}, empty("No group yet", "A group is a name for nodes that work together, for example two Macs on one Thunderbolt cable.")),
      section("New group", { className: "narrow", key: "new" }, this.#form(store)),
    ];
  }

  #form(store) {
    return h(
      "form",
      { onsubmit: (event) => this.#create(event) },
      field("group-name", "Name", { required: true, maxlength: "100", placeholder: "Thunderbolt Pair" }),
      field("group-nodes", "Nodes", { required: true, placeholder: "head-mini, allens-mini" }, "Names of nodes, separated by commas. The first one is drawn in the middle."),
      store.nodes.length > 0 && this.#suggestions(store.nodes),
      this.outcome,
      h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Create the group"), keyHint(this.page)),
    );
  }

  #suggestions(nodes) {
    const add = (alias) => {
      const input = document.getElementById("group-nodes");
      const names = input.value.split(",").map((each) => each.trim()).filter(Boolean);
      if (!names.includes(alias)) input.value = [...names, alias].join(", ");
      input.focus();
    };
    return h(
      "ul",
      { class: "chips" },
      nodes
        .filter((node) => !node.alias.includes(","))
        .slice(0, 24)
        .map((node) => h("li", { key: node.id }, h("button", { type: "button", class: "quiet small", "aria-label": `Add ${node.alias}`, onclick: () => add(node.alias) }, name(node.alias)))),
    );
  }

  async #create(event) {
    event.preventDefault();
    const form = event.target;
    const nodeIds = form.elements["group-nodes"].value.split(",").map((each) => each.trim()).filter(Boolean);
    try {
      const group = await call("POST", "v1/network/groups", { name: form.elements["group-name"].value, node_ids: nodeIds });
      form.reset();
      this.outcome = message("good", "Created ", name(group.name), ".");
    } catch (error) {
      this.outcome = message("bad", reasonOf(error));
    }
    this.page.refresh();
  }
}

/** A button that asks for the API key, where one is needed and missing. */
export function keyHint(page) {
  return hasKey() ? h("span", { class: "soft" }, "The API key is given.") : h("button", { type: "button", class: "quiet", onclick: () => page.askForKey() }, "Give the API key first");
}

function groupCard(group) {
  const present = new Map(group.members.flatMap((node) => [[node.id, node], [node.alias, node]]));
  return h(
    "li",
    { class: "card", key: group.id },
    h("header", { class: "card-head" }, h("h3", null, name(group.name)), h("span", { class: "note" }, `${group.online} of ${group.node_ids.length} online`)),
    h(
      "ul",
      { class: "members" },
      group.node_ids.map((id) => h("li", { key: id }, name(present.get(id)?.alias ?? id), present.has(id) ? badge(present.get(id).status) : badge("unknown"))),
    ),
  );
}
