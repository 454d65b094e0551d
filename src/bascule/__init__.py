"""Bascule: a JMS broker whose journal is Kafka and whose bridge to Kafka is Spark."""

__version__ = "0.1.0"
