// The forms in which a pipeline is defined at run time: the settings of the configuration file that can be given then.
//
// `kind` says how a text becomes a value. An empty text leaves the setting at its default.

const FLAG = ["", "true", "false"];

export const FIELDS = Object.freeze({
  diverts: [
    { name: "from", label: "From: an address; * stands for one word, # for any number of words", attributes: { required: true } },
    { name: "selector", label: "Selector; empty for every message" },
    { name: "to", label: "To: a topic of Kafka; ${address} is the address of the message" },
    { name: "key", label: "Record key: message-id, correlation-id, group-id, property:NAME or none" },
    { name: "from_kafka", label: "Also messages that came from Kafka", choices: FLAG, kind: "flag" },
    { name: "user", label: "User who must have the permission consume; empty for none" },
  ],
  ingresses: [
    { name: "topics", label: "Topics of Kafka, with commas between them", kind: "list" },
    { name: "pattern", label: "Or a regular expression for names of topics" },
    { name: "to", label: "Destination: queue://NAME or topic://NAME; ${topic} and ${header:NAME} are replaced" },
    { name: "routing", label: "Kind of a destination without a prefix", choices: ["", "multicast", "anycast"] },
    { name: "body", label: "Kind of the message", choices: ["", "text", "bytes", "map"] },
    { name: "reply_to", label: "JMSReplyTo" },
    { name: "key_as", label: "Record key as: correlation-id, group-id, property:NAME or none" },
    { name: "unbound", label: "Unbound: a message without a queue or subscription", choices: ["", "drop", "keep"] },
    { name: "keep_user_id", label: "Keep JMSXUserID of the record", choices: FLAG, kind: "flag" },
    { name: "user", label: "User who must have the permission send; empty for none" },
    { name: "tasks", label: "Spark tasks", kind: "number", attributes: { type: "number", min: 1 } },
  ],
});

// Settings that are given once.
export const FIRST = [
  { name: "name", label: "Name", attributes: { required: true } },
  { name: "start", label: "Start: earliest, latest or a time such as 2026-01-31T08:00:00Z; empty for the default" },
];

const VALUES = {
  list: (text) => text.split(",").map((each) => each.trim()).filter((each) => each),
  flag: (text) => text === "true",
  number: Number,
};

// The fields with the values of a definition.
export function filled(fields, config) {
  const text = (value) => (value === undefined || value === null ? "" : Array.isArray(value) ? value.join(", ") : String(value));
  return fields.map((field) => ({ ...field, value: text(config[field.name]) }));
}

// The definition that a form gives. Settings of `before` that the form does not have stay.
export function definitionOf(fields, answer, before = {}) {
  const config = { ...before };
  for (const { name, kind } of fields) {
    const text = answer[name].trim();
    if (text) config[name] = kind ? VALUES[kind](text) : text;
    else delete config[name];
  }
  return config;
}
