"""A Spark job of your own on JMS traffic: large orders from queue `orders`, as alerts into JMS topic `alerts`.

    bascule up &                                   # prints kafka=127.0.0.1:9092
    KAFKA=127.0.0.1:9092 .venv/bin/python examples/spark_job.py

Stop it and start it again, or kill it: each alert is sent once.
"""

from __future__ import annotations

import os

from pyspark.sql import functions as F

from bascule.pipelines.source import register
from bascule.pipelines.spark import spark_session
from bascule.pipelines.spec import Pipelines

kafka = os.environ.get("KAFKA", "127.0.0.1:9092")
checkpoint = os.environ.get("CHECKPOINT", "orders-checkpoint")
# Any session will do; this one has Bascule's settings for a fast start on one machine.
spark = spark_session(Pipelines("spark-job", {"bootstrap.servers": kafka}))
register(spark)

orders = (
    spark.readStream.format("bascule")
    .option("kafka.bootstrap.servers", kafka)
    .option("prefix", os.environ.get("PREFIX", "bascule"))
    .option("address", "orders")
    .option("selector", "amount > 1000")
    .option("startingOffsets", "earliest")
    .load()
)
alerts = orders.select(
    F.concat(F.lit("large order: "), F.col("text")).alias("value"),
    F.col("message_id").alias("correlation_id"),
    F.create_map(F.lit("amount"), F.col("properties")["amount"]).alias("properties"),
)
query = (
    alerts.writeStream.format("bascule")
    .option("id", "large-orders")
    .option("kafka.bootstrap.servers", kafka)
    .option("prefix", os.environ.get("PREFIX", "bascule"))
    .option("address", "alerts")
    .option("routing", "topic")
    .option("unbound", "keep")
    .option("checkpointLocation", checkpoint)
    .start()
)
query.awaitTermination()
