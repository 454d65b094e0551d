"""Move the waiting messages of a queue to another broker. Both brokers must speak AMQP 1.0.

    python examples/move_messages.py FROM-URL QUEUE TO-URL [QUEUE]

If this program is killed, start it again: the broker at TO-URL stores each message once.
"""

import sys

from bascule import Acknowledge, Context, Message, Queue, connect

#: A queue that gives no message for this time counts as empty.
EMPTY_AFTER_S = 5.0


def pass_on(message: Message, target: Context, queue: Queue) -> None:
    """Send a message as it was received, under its id; returns when the target has stored it."""
    message.destination = queue
    if message.message_id:  # both Artemis and Bascule drop a message whose duplicate id they know
        message.properties.setdefault("_AMQ_DUPL_ID", message.message_id)
    target.producer(queue).repeat(message)


def main(source_url: str, source_name: str, target_url: str, target_name: str) -> None:
    moved = 0
    with (
        connect(source_url, acknowledge=Acknowledge.CLIENT) as source,
        connect(target_url) as target,
        source.consumer(Queue(source_name), prefetch=100) as consumer,
    ):
        for message in consumer.messages(timeout_s=EMPTY_AFTER_S):
            pass_on(message, target, Queue(target_name))
            message.acknowledge()
            moved += 1
    print(f"{moved} moved")


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4] if len(sys.argv) > 4 else sys.argv[2])
