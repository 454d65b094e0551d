"""PySpark pipelines: diverts (JMS to Kafka) and ingresses (Kafka to JMS), exactly once."""
