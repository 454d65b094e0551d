// All requests of the console. `ask` in api.js sends no others, so a page can do nothing that HTTP cannot.
//
// Tests compare this list with the OpenAPI document, and the document with the commands of the command line.

class AdminRequest {
  constructor(text) {
    [this.method, this.path] = text.split(" ");
    Object.freeze(this);
  }

  // The path with these names in it.
  with(names) {
    return this.path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(String(names[name])));
  }
}

const made = (table) => Object.freeze(Object.fromEntries(Object.entries(table).map(([name, text]) => [name, new AdminRequest(text)])));

export const isRequest = (given) => given instanceof AdminRequest;

export const CONSOLE = made({
  session: "GET /console/session",
  logIn: "POST /console/login",
  logOut: "POST /console/logout",
});

export const BROKER = made({
  overview: "GET /overview",
  settings: "GET /settings",
  permissions: "GET /permissions",
  flow: "GET /flow",
  brokers: "GET /brokers",
});

export const LISTS = made({
  queues: "GET /list/queues",
  topics: "GET /list/topics",
  subscriptions: "GET /list/subscriptions",
  connections: "GET /list/connections",
  branches: "GET /list/branches",
});

export const QUEUES = made({
  show: "GET /queues",
  create: "POST /queues/create",
  purge: "POST /queues/purge",
  move: "POST /queues/move",
  delete: "POST /queues/delete",
  deleteSubscription: "POST /subscriptions/delete",
});

export const MESSAGES = made({
  list: "GET /messages",
  show: "GET /messages/show",
  body: "GET /messages/body",
  life: "GET /messages/life",
  send: "POST /messages/send",
});

export const DEAD_LETTERS = made({
  list: "GET /dead-letters",
  return: "POST /dead-letters/return",
});

export const CONNECTIONS = made({
  links: "GET /connections/links",
  close: "POST /connections/close",
});

export const BRANCHES = made({
  commit: "POST /branches/commit",
  rollback: "POST /branches/rollback",
  forget: "POST /branches/forget",
});

// By collection: the pages of diverts and ingresses are the same.
export const PIPELINES = Object.freeze({
  diverts: made({
    list: "GET /diverts",
    create: "POST /diverts",
    show: "GET /diverts/{name}",
    change: "PUT /diverts/{name}/config",
    delete: "DELETE /diverts/{name}",
    status: "GET /diverts/{name}/status",
    pause: "PUT /diverts/{name}/pause",
    resume: "PUT /diverts/{name}/resume",
    stop: "PUT /diverts/{name}/stop",
    restart: "POST /diverts/{name}/restart",
    positions: "GET /diverts/{name}/offsets",
    move: "PATCH /diverts/{name}/offsets",
    reset: "DELETE /diverts/{name}/offsets",
  }),
  ingresses: made({
    list: "GET /ingresses",
    create: "POST /ingresses",
    show: "GET /ingresses/{name}",
    change: "PUT /ingresses/{name}/config",
    delete: "DELETE /ingresses/{name}",
    status: "GET /ingresses/{name}/status",
    pause: "PUT /ingresses/{name}/pause",
    resume: "PUT /ingresses/{name}/resume",
    stop: "PUT /ingresses/{name}/stop",
    restart: "POST /ingresses/{name}/restart",
    positions: "GET /ingresses/{name}/offsets",
    move: "PATCH /ingresses/{name}/offsets",
    reset: "DELETE /ingresses/{name}/offsets",
  }),
});

export const REDRIVE = made({
  letters: "GET /redrive/letters",
  jobs: "GET /redrive/jobs",
  run: "POST /redrive/run",
  discard: "POST /redrive/discard",
});
