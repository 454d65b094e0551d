"""Write lines to a Kafka topic, or show what a topic holds: a Kafka client like any other, for trying diverts and ingresses.

    echo '{"faa": "JFK"}' | python examples/kafka_topic.py write airport.alerts --key JFK
    python examples/kafka_topic.py read kafka.flights.delayed --count 1

It finds the Kafka of the `bascule up` that runs in the working directory; --bootstrap names another.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic


def write(bootstrap: str, topic: str, key: str | None) -> None:
    # The embedded Kafka creates no topic on its own.
    admin = AdminClient({"bootstrap.servers": bootstrap})
    if topic not in admin.list_topics(timeout=10).topics:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for line in sys.stdin:
        producer.produce(topic, line.rstrip("\n"), key)
    producer.flush()


def read(bootstrap: str, topic: str, count: int, timeout_s: float) -> int:
    # Only a read_committed reader sees exactly once: librdkafka's default, but not Java's.
    settings = {"group.id": "try", "auto.offset.reset": "earliest", "isolation.level": "read_committed", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": bootstrap, "topic.metadata.refresh.interval.ms": 500, **settings})
    consumer.subscribe([topic])
    deadline = time.monotonic() + timeout_s
    while count and time.monotonic() < deadline:
        record = consumer.poll(0.2)
        if record is not None and record.error() is None:
            headers = {name: value.decode() for name, value in record.headers() or ()}
            print(f"{(record.key() or b'-').decode()} {record.value().decode()}", json.dumps(headers), flush=True)
            count -= 1
    consumer.close()
    return 1 if count else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("read", "write"))
    parser.add_argument("topic")
    parser.add_argument("--key")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--bootstrap")
    given = parser.parse_args()
    kafka = given.bootstrap or f"127.0.0.1:{json.loads(Path('bascule-data/ports.json').read_text())['kafka']}"
    sys.exit(write(kafka, given.topic, given.key) if given.action == "write" else read(kafka, given.topic, given.count, given.timeout_s))
