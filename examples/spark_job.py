"""A Spark job of your own on JMS traffic: for each flight that is more than an hour late, a message to the queue `late`.

    python examples/spark_job.py 127.0.0.1:9092 CHECKPOINT-DIRECTORY

It reads the broker's journal and writes to JMS, each message exactly once as long as it keeps its checkpoint. Any Spark cluster runs it
where the package bascule is installed; it needs no jars.
"""

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bascule.pipelines.source import register


def main(bootstrap: str, checkpoint: str) -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers need the package, too
    spark = SparkSession.builder.appName("late").master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    register(spark)
    # Names of the bridge, if not the default ones.
    bridge = {"bridge": os.environ.get("BASCULE_BRIDGE__ID", "bascule"), "prefix": os.environ.get("BASCULE_JOURNAL__PREFIX", "bascule")}
    kafka = {"kafka.bootstrap.servers": bootstrap, **bridge}

    flights = spark.readStream.format("bascule").options(**kafka, address="flights", startingOffsets="earliest").load()
    late = flights.where("int(properties['dep_delay']) > 60").select(
        F.concat("properties.carrier", F.lit(" is late by "), "properties.dep_delay").alias("value"), "properties", "message_id"
    )
    query = (
        late.writeStream.format("bascule")
        .options(**kafka, id="late", address="late", routing="queue")
        .option("checkpointLocation", checkpoint)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
