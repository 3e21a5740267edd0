/**
 * A page as a value: views return trees of h(), render() changes the document to match. What did not change is not
 * touched, so focus, selection and scroll positions survive. Text only ever becomes text nodes; there is no way to HTML. What
 * of it could not be seen is made visible.
 */

import { visible } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const SPOKEN = new Set(["title", "aria-label", "alt", "placeholder"]); // attributes that are shown or read out
const known = new WeakMap(); // element -> the tree it was made of

/**
 * One element. Props: `class`, attributes, `on…` listeners, `style` (an object), `key` (keeps its element when siblings come
 * and go), `mount` (called once with the element; its inside then belongs to the caller).
 */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: children.flat(Infinity).filter(isShown) };
}

/** Make the inside of an element match these trees. */
export function render(root, ...nodes) {
  patchChildren(root, nodes.flat(Infinity).filter(isShown), root.namespaceURI === SVG);
}

function isShown(node) {
  return node !== null && node !== undefined && node !== false && node !== "";
}

function isText(node) {
  return typeof node !== "object";
}

function keyOf(child) {
  return known.get(child)?.props.key;
}

function patchChildren(parent, wanted, svg) {
  const keys = new Set(wanted.map((node) => node.props?.key).filter((key) => key !== undefined));
  const keyed = new Map();
  for (const child of parent.childNodes) {
    const key = keyOf(child);
    if (key !== undefined) keyed.set(key, child);
  }
  let cursor = parent.firstChild;
  for (const node of wanted) {
    // What is not wanted any more goes first: else all that follows would have to move, and lose its focus.
    while (cursor && keyOf(cursor) !== undefined && !keys.has(keyOf(cursor))) cursor = removeAndNext(cursor);
    const found = match(node, cursor, keyed);
    const child = found ?? create(node, svg);
    if (child === cursor) cursor = cursor.nextSibling;
    else parent.insertBefore(child, cursor);
    patch(child, node, svg);
  }
  while (cursor) cursor = removeAndNext(cursor);
}

function removeAndNext(child) {
  const next = child.nextSibling;
  child.remove();
  return next;
}

function match(node, cursor, keyed) {
  const key = node.props?.key;
  if (key !== undefined) {
    const child = keyed.get(key);
    keyed.delete(key);
    return child?.localName === node.tag ? child : null;
  }
  if (!cursor || keyOf(cursor) !== undefined) return null;
  if (isText(node)) return cursor.nodeType === Node.TEXT_NODE ? cursor : null;
  const made = known.get(cursor);
  return made && made.tag === node.tag && made.props.mount === node.props.mount ? cursor : null;
}

function create(node, svg) {
  if (isText(node)) return document.createTextNode(visible(String(node)));
  return svg || node.tag === "svg" ? document.createElementNS(SVG, node.tag) : document.createElement(node.tag);
}

function patch(child, node, svg) {
  if (isText(node)) {
    const text = visible(String(node));
    if (child.data !== text) child.data = text;
    return;
  }
  const before = known.get(child);
  known.set(child, node);
  patchProps(child, before?.props ?? {}, node.props);
  if (node.props.mount) {
    if (!before) node.props.mount(child);
    return;
  }
  patchChildren(child, node.children, svg || node.tag === "svg");
}

function patchProps(element, before, props) {
  for (const name of Object.keys(before)) {
    if (!(name in props)) setProp(element, name, undefined, before[name]);
  }
  for (const [name, value] of Object.entries(props)) setProp(element, name, value, before[name]);
}

function setProp(element, name, value, before) {
  if (name === "key" || name === "mount") return;
  if (name.startsWith("on")) {
    element[name] = value ?? null;
  } else if (name === "style") {
    // Through the object model: style attributes are refused by the page's security policy.
    for (const property of Object.keys(before ?? {})) if (!value || !(property in value)) element.style.removeProperty(property);
    for (const [property, text] of Object.entries(value ?? {})) {
      if (before?.[property] !== text) element.style.setProperty(property, text);
    }
  } else if (value !== before) {
    if (value === undefined || value === null || value === false) element.removeAttribute(name);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, SPOKEN.has(name) ? visible(String(value)) : String(value));
  }
}
