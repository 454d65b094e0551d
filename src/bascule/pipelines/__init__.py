"""PySpark pipelines: diverts (JMS to Kafka) and ingresses (Kafka to JMS), exactly once."""

from bascule.core.extras import require

require("pipelines")
