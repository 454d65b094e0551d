"""The Kafka resource adapter: records into endpoints, and messages out of them, within a transaction or without."""

from bascule.core.extras import require

require("kafka")
