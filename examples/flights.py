"""A divert's transformation in Python: a function from message rows to records, each row by itself.

The driver calls it once, to plan; Spark runs the plan. examples/transformed.toml names it, so this directory must be on PYTHONPATH.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

AIRLINES = [("B6", "JetBlue"), ("UA", "United")]


def named(messages: DataFrame) -> DataFrame:
    """Leave out airlines nobody knows, and write the name of the others."""
    airlines = messages.sparkSession.createDataFrame(AIRLINES, "carrier string, airline string")
    known = messages.join(F.broadcast(airlines), F.col("properties")["carrier"] == F.col("carrier"))
    return known.withColumn("key", F.col("carrier")).withColumn(
        "value", F.to_json(F.struct("airline", F.get_json_object("text", "$.flight").cast("int").alias("flight")))
    )
