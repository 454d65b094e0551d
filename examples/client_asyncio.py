"""Send readings of many sensors to one topic, with a subscriber for each room, in one event loop.

python examples/client_asyncio.py [amqp://[USER:PASSWORD@]HOST[:PORT]]
"""

import asyncio
import sys

from bascule import AsyncConsumer, Message, Topic, connect_async

READINGS = Topic("readings")
ROOMS = ("attic", "cellar")


async def warmest(consumer: AsyncConsumer) -> float:
    return max([float(message.body["celsius"]) async for message in consumer.messages(timeout_s=3.0)])


async def main(url: str) -> None:
    async with connect_async(url) as context:
        consumers = [await context.consumer(READINGS, selector=f"room = '{room}'") for room in ROOMS]
        producer = context.producer(READINGS, persistent=False)
        sent = [
            await producer.send_async(Message({"celsius": 15 + step / 10}, properties={"room": ROOMS[step % 2]})) for step in range(100)
        ]
        await asyncio.gather(*sent)
        for room, celsius in zip(ROOMS, await asyncio.gather(*map(warmest, consumers)), strict=True):
            print(f"{room} {celsius:.1f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "amqp://127.0.0.1:5672"))
