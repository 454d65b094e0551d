// Requests to the admin server. Every other client uses the same paths.

const HEADERS = { "x-bascule-console": "1" };
const ROLES = ["view", "edit", "manage"];

export const session = { name: null, role: null, csrf: "", restricted: true };

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...HEADERS, ...options.headers }, credentials: "same-origin", cache: "no-store" });
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

export function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams(parameters).toString();
  return ask(`/${path}${query ? `?${query}` : ""}`, { method: "GET", signal });
}

export function change(method, path, content = {}, headers = {}) {
  const given = session.csrf ? { "x-csrf-token": session.csrf, ...headers } : headers;
  return ask(`/${path}`, { method, headers: { "content-type": "application/json", ...given }, body: JSON.stringify(content) });
}

export function post(path, content = {}, headers = {}) {
  return change("POST", path, content, headers);
}

export async function refreshSession() {
  Object.assign(session, await get("console/session"));
}

export async function logIn(user, password) {
  const bytes = new TextEncoder().encode(`${user}:${password}`);
  const authorization = user ? `Basic ${btoa(String.fromCharCode(...bytes))}` : `Bearer ${password}`;
  Object.assign(session, await post("console/login", {}, { authorization }));
}

export async function logOut() {
  await post("console/logout");
  session.name = session.role = null;
}

export function may(role) {
  return session.role !== null && ROLES.indexOf(session.role) >= ROLES.indexOf(role);
}
