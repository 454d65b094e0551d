"""The only package that uses the Kafka client: log, positions, transactional writer."""

from bascule.core.extras import require

require("kafka")
