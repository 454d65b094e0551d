"""The only place that knows the Kafka client: log, positions, transactional writer."""
