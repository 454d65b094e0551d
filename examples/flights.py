"""A divert's transformation in Python: a function from message rows to records, which treats each row separately.

The driver calls it once to make a plan, and Spark runs the plan. examples/transformed.toml names it: PYTHONPATH must have this directory.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

AIRLINES = [("B6", "JetBlue"), ("UA", "United")]


def named(messages: DataFrame) -> DataFrame:
    """Leave out unknown airlines, and write the names of the others."""
    airlines = messages.sparkSession.createDataFrame(AIRLINES, "carrier string, airline string")
    known = messages.join(F.broadcast(airlines), F.col("properties")["carrier"] == F.col("carrier"))
    return known.withColumn("key", F.col("carrier")).withColumn(
        "value", F.to_json(F.struct("airline", F.get_json_object("text", "$.flight").cast("int").alias("flight")))
    )
