"""Move orders from one queue to another, each in a transaction. Whatever dies, each order is in exactly one of the queues.

python examples/client_transfer.py [amqp://[USER:PASSWORD@]HOST[:PORT]]
"""

import sys

from bascule import Message, Queue, TransactionInDoubt, TransactionRolledBack, connect

NEW, CHECKED = Queue("orders.new"), Queue("orders.checked")


def checked(order: Message) -> Message:
    # If a commit is in doubt, the order may be redelivered. By this id the broker recognises a message that it already has.
    return Message(f"{order.body}, checked", properties={"_AMQ_DUPL_ID": f"checked {order.body}"})


def main(url: str) -> None:
    with connect(f"failover:({url})?failover.maxReconnectDelay=1000") as context:
        context.producer(NEW).send_many(f"order {number}" for number in range(3))
        with context.consumer(NEW) as orders:
            left = 3
            while left:
                try:
                    with context.transaction():
                        order = orders.receive(timeout_s=5.0)
                        if order is None:
                            break  # moved by a commit that was in doubt
                        context.send(CHECKED, checked(order))
                    left -= 1
                except (TransactionRolledBack, TransactionInDoubt) as error:
                    print(f"again: {error}")
        for order in context.browse(CHECKED):
            print(order.body)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "amqp://127.0.0.1:5672")
