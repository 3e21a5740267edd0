/** Registering a node: reserves a name and yields the pairing token, which is shown once. */

import { call, hasKey, reasonOf } from "./api.js";
import { h } from "./dom.js";
import { duration } from "./format.js";
import { badge, empty, facts, field, message, name, section, table } from "./parts.js";

const ROLES = ["hybrid", "head", "cache", "inference"];

export class RegisterView {
  title = "Register";
  topics = ["summary", "bus", "nodes"];

  constructor(page) {
    this.page = page;
    this.outcome = null;
    this.made = null;
    this.madeAt = 0;
  }

  render(store) {
    return [
      h("div", { class: "columns even" }, section("Register a node", {}, this.#form()), section("Pairing token", {}, this.#token())),
      section("Registered, not heard", {}, this.#waiting(store.nodes.filter((node) => node.status === "pending" || node.status === "offline"))),
    ];
  }

  #form() {
    return h(
      "form",
      { onsubmit: (event) => this.#register(event) },
      field("alias", "Alias", { required: true, maxlength: "100", placeholder: "allens-mini" }, "The name it is shown by; best its node id."),
      field("address", "Address", { required: true, minlength: "3", maxlength: "255", placeholder: "192.168.1.21:52051" }, "Shown only to those who have the API key."),
      field("region", "Region", { maxlength: "100", placeholder: "Private" }, "Coarse, such as a room or a city: everybody sees it."),
      h("div", { class: "field", key: "role" }, h("label", { for: "role" }, "Role"), h("select", { id: "role", name: "role" }, ROLES.map((role) => h("option", { key: role, value: role }, role)))),
      !hasKey() && field("register-key", "API key", { type: "password", required: true, maxlength: "1024" }, "In ~/.kakeya/network_api_key on the dashboard's machine."),
      this.outcome,
      h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Register"), hasKey() && h("span", { class: "soft" }, "The API key is given.")),
    );
  }

  #token() {
    const made = this.made;
    if (!made) return empty("No token yet", "Registering makes one. It is shown once, works once, and ends after ten minutes.");
    const left = made.expires_at - made.created_at - (performance.now() - this.madeAt) / 1000;
    if (left <= 0) return empty("The token has expired", "Register again.");
    return [
      h("p", null, "For ", name(made.alias, "strong"), ". On that node, run"),
      h("pre", { tabindex: "0", "aria-label": "Command" }, `kakeya pair --dashboard ${location.origin} --node-id ${shellWord(made.alias)}`),
      h("p", null, "and paste the token:"),
      h("div", { class: "token" }, h("code", { id: "pairing-token" }, made.pairing_token), h("button", { type: "button", onclick: () => this.#copy() }, "Copy")),
      facts([
        ["Expires in", duration(left)],
        ["Region", name(made.region)],
        ["Role", made.role],
      ]),
    ];
  }

  #waiting(nodes) {
    if (!nodes.length) return empty("Nothing waits", "A registration is shown here until its node is heard or it expires.");
    return table({
      caption: "Registrations whose node is not heard",
      items: nodes,
      key: (node) => node.id,
      columns: [
        { head: "Alias", className: "title", cell: (node) => name(node.alias, "strong") },
        { head: "Region", cell: (node) => name(node.region) },
        { head: "Role", cell: (node) => node.role },
        { head: "Status", cell: (node) => badge(node.status) },
        ...(nodes.some((node) => node.endpoint.address) ? [{ head: "Address", cell: (node) => name(node.endpoint.address) }] : []),
        ...(hasKey() ? [{ head: "", className: "more", cell: (node) => this.#forgetButton(node) }] : []),
      ],
    });
  }

  #forgetButton(node) {
    if (node.status !== "pending") return h("span", { class: "soft" }, "paired");
    return h("button", { type: "button", class: "quiet small", "aria-label": `Forget ${node.alias}`, onclick: () => this.#forget(node) }, "Forget");
  }

  async #register(event) {
    event.preventDefault();
    const inputs = event.target.elements;
    const body = { alias: inputs.alias.value, address: inputs.address.value, role: inputs.role.value };
    if (inputs.region.value) body.region = inputs.region.value;
    try {
      this.made = await call("POST", "v1/network/nodes/register", body, inputs["register-key"]?.value.trim());
      this.madeAt = performance.now();
      this.outcome = message("good", "Registered. The token is shown once.");
      event.target.reset();
    } catch (error) {
      this.outcome = message("bad", reasonOf(error));
    }
    this.page.refresh();
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(this.made.pairing_token);
      this.outcome = message("good", "Copied.");
    } catch {
      // Not allowed, or not over HTTPS: select it, so that the keyboard's copy takes it.
      getSelection().selectAllChildren(document.getElementById("pairing-token"));
      this.outcome = message("good", "Selected: copy it with the keyboard.");
    }
    this.page.refresh();
  }

  async #forget(node) {
    try {
      await call("DELETE", `v1/network/nodes/register/${encodeURIComponent(node.id)}`);
      this.outcome = message("good", "Forgotten.");
    } catch (error) {
      this.outcome = message("bad", reasonOf(error));
    }
    this.page.refresh();
  }
}

function shellWord(text) {
  return /^[A-Za-z0-9._-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
