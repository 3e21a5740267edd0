/** The API key: asked for once, kept in the memory of this page. */

import { checkKey, hasKey, reasonOf, setKey } from "./api.js";
import { h, render } from "./dom.js";
import { field, message } from "./parts.js";

export class KeyDialog {
  /** `onChange()` is called when a key was taken or forgotten. */
  constructor(dialog, button, onChange) {
    this.dialog = dialog;
    this.button = button;
    this.onChange = onChange;
    this.problem = "";
    button.onclick = () => this.open();
    this.#label();
  }

  open() {
    this.problem = "";
    this.#render();
    this.dialog.showModal();
    this.dialog.querySelector("input")?.focus();
  }

  #label() {
    this.button.textContent = hasKey() ? "Key given" : "API key";
    this.button.setAttribute("aria-pressed", hasKey() ? "true" : "false");
  }

  #render() {
    const given = hasKey();
    render(
      this.dialog,
      h("h2", { id: "key-title" }, "API key"),
      h("p", { class: "soft" }, "It shows addresses and reasons, and is needed to register nodes and make groups. It stays in this page until the page is closed."),
      given
        ? h("div", { class: "actions" }, h("button", { type: "button", onclick: () => this.#forget() }, "Forget the key"), this.#closeButton())
        : h(
            "form",
            { onsubmit: (event) => this.#take(event) },
            field("api-key", "Key", { type: "password", required: true, maxlength: "1024" }, "It is in ~/.kakeya/network_api_key on the dashboard's machine."),
            this.problem && message("bad", this.problem),
            h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Use it"), this.#closeButton()),
          ),
    );
  }

  #closeButton() {
    return h("button", { type: "button", class: "quiet", onclick: () => this.dialog.close() }, "Close");
  }

  #forget() {
    setKey("");
    this.#changed();
  }

  async #take(event) {
    event.preventDefault();
    const key = this.dialog.querySelector("input").value;
    try {
      await checkKey(key);
    } catch (error) {
      this.problem = reasonOf(error);
      this.#render();
      return;
    }
    setKey(key);
    this.#changed();
  }

  #changed() {
    render(this.dialog); // The key does not stay in the document.
    this.dialog.close();
    this.#label();
    this.onChange();
  }
}
