"""Send orders to a queue and take them again, each acknowledged when it is done with.

python examples/orders.py [amqp://[USER:PASSWORD@]HOST[:PORT]]
"""

import sys
import time
import uuid

from bascule.amqp.types import Int
from bascule.client.blocking import Address, Client
from bascule.jms.message import JmsMessage, decode_message, encode_message

QUEUE = "orders"


def order(number: int) -> JmsMessage:
    return JmsMessage(
        body_kind="text",
        body=f"order {number}",
        destination=QUEUE,
        destination_kind="queue",
        delivery_mode="PERSISTENT",
        message_id=f"ID:{uuid.uuid4()}",
        timestamp_ms=time.time_ns() // 1_000_000,
        properties={"number": Int(number), "region": "EU" if number % 2 else "US"},
    )


def main(url: str) -> None:
    with Client(Address.parse(url)) as client:
        sender = client.sender(QUEUE)
        for number in range(10):
            sender.send(encode_message(order(number)))
        sender.flush()  # returns when Kafka has all of them
        print(f"{sender.accepted} stored")

        receiver = client.receiver(QUEUE, selector="region = 'EU'")
        while (delivery := receiver.receive(timeout_s=2.0)) is not None:
            message = decode_message(delivery.data)
            print(message.body, message.properties)
            receiver.accept(delivery)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "amqp://127.0.0.1:5672")
