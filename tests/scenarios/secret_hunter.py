"""A transformation that looks for secrets where a Python function in a Spark worker can look. Each secret begins with ``MARK-``."""

import gc
import json
import os
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

#: The planted secrets are this text, a hyphen and their kind. The hunter itself has only this text in memory.
MARK = "planted-secret"


def _found(_: str) -> str:
    context = TaskContext.get()
    properties = {} if context is None else context._localProperties or {}
    texts = [each for each in gc.get_objects() if isinstance(each, dict) for each in each.values() if isinstance(each, str)]
    with Path("/proc/self/environ").open("rb") as environment, Path("/proc/self/cmdline").open("rb") as command:
        places = {
            "environment": " ".join(f"{name}={value}" for name, value in os.environ.items()),
            "first environment": environment.read().decode(errors="replace"),
            "command line": command.read().decode(errors="replace"),
            "task": json.dumps(properties),
            "objects": " ".join(texts),
        }
    # The record must not contain a secret that was found.
    return json.dumps([place for place, found in places.items() if f"{MARK}-" in found])


def hunt(messages: DataFrame) -> DataFrame:
    """Write where secrets are found."""
    return messages.withColumn("value", F.udf(_found, "string")(F.col("text")))
