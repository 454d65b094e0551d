"""PySpark pipelines: diverts (JMS to Kafka) and ingresses (Kafka to JMS), exactly once.

A broker imports the modules about positions, specifications and records of diverts, so they do not need the extra ``pipelines``. A module
that loads Spark or Arrow and is imported from other packages calls ``require``: ``driver``, ``source`` and ``class_archive``.
"""
