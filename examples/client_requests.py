"""Send requests to a service, and wait for each reply in a temporary queue.

python examples/client_requests.py [amqp://[USER:PASSWORD@]HOST[:PORT]]
"""

import sys

from bascule import Message, Queue, TimedOut, connect

PRICES = Queue("prices")


def main(url: str) -> None:
    with connect(url) as service, connect(url) as shop:

        def price(request: Message) -> None:  # on the service's listener thread
            if request.body != "moon":
                service.reply(request, {"item": request.body, "price": 12.5})

        service.consumer(PRICES).listener = price
        print(shop.request(PRICES, "apple", timeout_s=10.0).body)
        try:
            shop.request(PRICES, "moon", timeout_s=0.5)
        except TimedOut:
            print("no price for the moon")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "amqp://127.0.0.1:5672")
