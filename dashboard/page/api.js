/** Calls of the JSON API. The API key lives in this page's memory only: it is in no storage, address or document. */

const KEY_HEADER = "X-API-Key";
let apiKey = "";

export function hasKey() {
  return apiKey !== "";
}

export function setKey(key) {
  apiKey = key.trim();
}

export function keyHeaders(key = apiKey) {
  return key ? { [KEY_HEADER]: key } : {};
}

/** A call that was refused, with the server's one line. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** One call; the decoded answer. Throws Refused, or TypeError when the dashboard cannot be reached. */
export async function call(method, path, body, key = apiKey) {
  const headers = { ...keyHeaders(key), ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
  const response = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
  });
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, answer?.detail ?? `the dashboard answered ${response.status}`);
  return answer;
}

export function get(path) {
  return call("GET", path);
}

/** Whether a key is right: asks what is never public. Throws Refused with the reason when it is not. */
export async function checkKey(key) {
  await call("GET", "v1/network/logs?limit=1", undefined, key.trim());
}

/** What to tell people about a call that failed. */
export function reasonOf(error) {
  return error instanceof Refused ? error.message : "the dashboard cannot be reached";
}
