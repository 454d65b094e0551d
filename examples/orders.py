"""Send orders to a queue, receive them, and acknowledge each after its processing.

python examples/orders.py [amqp://[USER:PASSWORD@]HOST[:PORT]]
"""

import sys

from bascule import Acknowledge, Message, Queue, connect

QUEUE = Queue("orders")


def order(number: int) -> Message:
    return Message(f"order {number}", properties={"number": number, "region": "EU" if number % 2 else "US"})


def main(url: str) -> None:
    with connect(url, acknowledge=Acknowledge.INDIVIDUAL) as context:
        stored = context.producer(QUEUE).send_many(order(number) for number in range(10))  # returns when Kafka has all of them
        print(f"{stored} stored")

        with context.consumer(QUEUE, selector="region = 'EU'") as consumer:
            for message in consumer.messages(timeout_s=3.0):
                print(message.body, message.properties)
                message.acknowledge()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "amqp://127.0.0.1:5672")
