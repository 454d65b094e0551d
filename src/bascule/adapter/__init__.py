"""The Kafka resource adapter: calls endpoints for records and sends messages, with or without a transaction."""

from bascule.core.extras import require

require("kafka")
