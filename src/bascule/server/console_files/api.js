// Requests to the admin server. Every other client uses the same paths.

import { CONSOLE, isRequest } from "./requests.js";

const HEADERS = { "x-bascule-console": "1" };
const ROLES = ["view", "edit", "manage"];

export const session = { name: null, role: null, csrf: "", restricted: true };

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(request, names, query, options) {
  let answer;
  const address = addressOf(request, query, names);
  try {
    answer = await fetch(address, { method: request.method, ...options, headers: { ...HEADERS, ...options.headers }, credentials: "same-origin", cache: "no-store" });
  } catch {
    throw new Refused(0, "the broker does not answer");
  }
  const text = await answer.text();
  let content;
  try {
    content = text ? JSON.parse(text) : null;
  } catch {
    content = { error: text };
  }
  if (answer.ok) return content;
  if (answer.status === 401 && session.name !== null) {
    session.name = session.role = null;
    window.dispatchEvent(new Event("logged-out"));
  }
  throw new Refused(answer.status, content?.error ?? `the broker answered ${answer.status}`);
}

// The address of a request of requests.js. `names` are those in its path.
export function addressOf(request, parameters = {}, names = {}) {
  if (!isRequest(request)) throw new TypeError("a request that requests.js does not have");
  const query = new URLSearchParams(parameters).toString();
  return `${request.with(names)}${query ? `?${query}` : ""}`;
}

// Sends a request that changes nothing.
export function look(request, parameters = {}, { names = {}, signal = undefined } = {}) {
  return ask(request, names, parameters, { signal });
}

// Sends a request that changes something.
export function act(request, content = {}, { names = {}, headers = {}, query = {} } = {}) {
  const given = session.csrf ? { "x-csrf-token": session.csrf, ...headers } : headers;
  return ask(request, names, query, { headers: { "content-type": "application/json", ...given }, body: JSON.stringify(content) });
}

export async function refreshSession() {
  Object.assign(session, await look(CONSOLE.session));
}

export async function logIn(user, password) {
  const bytes = new TextEncoder().encode(`${user}:${password}`);
  const authorization = user ? `Basic ${btoa(String.fromCharCode(...bytes))}` : `Bearer ${password}`;
  Object.assign(session, await act(CONSOLE.logIn, {}, { headers: { authorization } }));
}

export async function logOut() {
  await act(CONSOLE.logOut);
  session.name = session.role = null;
}

export function may(role) {
  return session.role !== null && ROLES.indexOf(session.role) >= ROLES.indexOf(role);
}
