"""Kafka, and other Java parts, as child processes of this one."""
