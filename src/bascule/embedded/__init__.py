"""Kafka and other Java programs as child processes."""
