"""Request and reply for a Kafka application, with JMS clients at the other end.

    python examples/kafka_quotes.py answer 3
    python examples/kafka_quotes.py ask 'EUR/USD'

Kafka is that of the `bascule up` that runs in the working directory; a third argument names another Kafka.
"""

import json
import sys
import uuid
from pathlib import Path

from confluent_kafka import Consumer, Producer


def answer(bootstrap: str, count: int) -> None:
    """Reply to requests in the topic quotes.questions, each to the destination that it names."""
    consumer, producer = reader(bootstrap, "quotes.questions", "quotes"), Producer({"bootstrap.servers": bootstrap})
    while count:
        question = consumer.poll(1.0)
        if question is None or question.error() is not None:
            continue
        asked = dict(question.headers())
        if "jms.JMSReplyTo" in asked:
            correlation = asked.get("jms.JMSCorrelationID", asked["jms.JMSMessageID"])
            headers = {"jms.JMSDestination": asked["jms.JMSReplyTo"], "jms.JMSCorrelationID": correlation}
            producer.produce("quotes.answers", f"{question.value().decode()} is 187.20", headers=headers)
            producer.flush()
        consumer.commit(question)
        count -= 1
    consumer.close()


def ask(bootstrap: str, text: str) -> None:
    """Write a request to the topic rates.questions, and wait for the reply in a topic of this program."""
    mine, number = "rates.answers.desk-1", str(uuid.uuid4())
    consumer, producer = reader(bootstrap, mine, f"desk-1-{number}"), Producer({"bootstrap.servers": bootstrap})
    producer.produce("rates.questions", text, headers={"reply-topic": mine, "jms.JMSCorrelationID": number})
    producer.flush()
    while (record := consumer.poll(60.0)) is not None:
        if record.error() is None and dict(record.headers())["jms.JMSCorrelationID"] == number.encode():
            print(record.value().decode())
            break
    consumer.close()


def reader(bootstrap: str, topic: str, group: str) -> Consumer:
    settings = {"group.id": group, "auto.offset.reset": "earliest", "isolation.level": "read_committed", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": bootstrap, "topic.metadata.refresh.interval.ms": 500, **settings})
    consumer.subscribe([topic])
    return consumer


if __name__ == "__main__":
    action, what, *rest = sys.argv[1:]
    kafka = rest[0] if rest else f"127.0.0.1:{json.loads(Path('bascule-data/ports.json').read_text())['kafka']}"
    ask(kafka, what) if action == "ask" else answer(kafka, int(what))
