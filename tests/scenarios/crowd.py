"""Many connections to a broker, in a process of their own: ``python -m tests.scenarios.crowd idle|churn PORT COUNT``.

``idle`` opens COUNT connections, prints how many the broker has accepted, and keeps them until its input ends. ``churn`` opens and closes
COUNT connections each second until its input ends; then it prints their number, the rate, and the longest time to open a connection.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bascule.amqp.composite import encode_composite
from bascule.amqp.frames import AMQP_HEADER, EMPTY_FRAME, SASL_FRAME, SASL_HEADER, frame
from bascule.amqp.performatives import Begin, Close, Open, SaslInit

SASL_ANONYMOUS: Final = SASL_HEADER + frame(0, encode_composite(SaslInit("ANONYMOUS", b"")), SASL_FRAME) + AMQP_HEADER
SESSION: Final = frame(0, encode_composite(Begin(None, 0, 100, 100)))
CLOSE: Final = frame(0, encode_composite(Close()))
#: The beginning of an open frame, after its header.
OPEN: Final = b"\x00\x53\x10"
#: Maximum number of connections that are being opened.
AT_ONCE: Final = 200
HEARTBEAT_S: Final = 10.0
TIMEOUT_S: Final = 60.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(port: int, container: str) -> Streams:
    """Open a connection, and return when the broker has opened it."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SASL_ANONYMOUS + frame(0, encode_composite(Open(container))) + SESSION)
        await reader.readuntil(OPEN)
    return reader, writer


async def closed(streams: Streams) -> None:
    reader, writer = streams
    async with asyncio.timeout(TIMEOUT_S):
        writer.write(CLOSE)
        await reader.read()
    writer.close()


def say(*figures: float) -> None:
    """Print a line for the test."""
    sys.stdout.write(f"{' '.join(map(str, figures))}\n")
    sys.stdout.flush()


async def input_ends() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def idle(port: int, count: int) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Streams:
        async with places:
            return await opened(port, f"idle-{number}")

    outcomes = await asyncio.gather(*(one(number) for number in range(count)), return_exceptions=True)
    everybody = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    say(len(everybody))
    over = asyncio.create_task(input_ends())
    while not over.done():
        for _, writer in everybody:
            writer.write(EMPTY_FRAME)
        await asyncio.wait([over], timeout=HEARTBEAT_S)
    say(sum(not reader.at_eof() for reader, _ in everybody))
    for _, writer in everybody:
        writer.close()


async def churn(port: int, per_second: int) -> None:
    over = asyncio.create_task(input_ends())
    longest_s, count = 0.0, 0
    under_way: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        nonlocal longest_s
        begun_s = time.monotonic()
        streams = await opened(port, f"churn-{number}")
        longest_s = max(longest_s, time.monotonic() - begun_s)
        await closed(streams)

    begun_s = time.monotonic()
    say(0)
    while not over.done():
        due = int((time.monotonic() - begun_s) * per_second)
        while count < due and len(under_way) < AT_ONCE:
            count += 1
            under_way.add(asyncio.create_task(one(count)))
        done, under_way = await asyncio.wait([over, *under_way], timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        under_way.discard(over)
    seconds = time.monotonic() - begun_s
    await asyncio.gather(*under_way)
    say(count, round(count / seconds), round(longest_s, 3))


class Crowd:
    """A process with many connections."""

    def __init__(self, what: str, port: int, count: int) -> None:
        command = [sys.executable, "-m", "tests.scenarios.crowd", what, str(port), str(count)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self.count = 0

    def begun(self) -> int:
        """Wait until the process has opened its connections, and return their number."""
        return int(self._stdout.readline())

    def end(self) -> list[float]:
        """Stop the process in order, and return its figures."""
        said, _ = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0
        return [float(word) for word in said.split()]

    def kill(self) -> None:
        """End the process, whatever its state."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def crowd(what: str, port: int, count: int) -> Iterator[Crowd]:
    """Start a crowd, and end it with the block."""
    found = Crowd(what, port, count)
    try:
        found.count = found.begun()
        yield found
    finally:
        found.kill()


if __name__ == "__main__":
    asyncio.run({"idle": idle, "churn": churn}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3])))
