"""Each fault of a link, seen from both ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.support.link_faults import FAULTS, WELL, BadLink

#: Time in which no data must arrive: long for loopback, short for a test.
NOTHING_S = 0.2
SOON_S = 10.0
DATA = b"0123456789"


class Ends:
    """A link, and the client's and the server's ends of a connection through it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.link = BadLink(self._listener.getsockname()[1])
        self.client, self.server = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(("127.0.0.1", self.link.port), SOON_S)
        server, _ = self._listener.accept()
        server.settimeout(SOON_S)
        return client, server

    def close(self) -> None:
        self.link.__exit__()
        for each in (self.client, self.server, self._listener):
            each.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def received(end: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        part = end.recv(size_bytes - len(data))
        if not part:
            break
        data += part
    return data


def is_silent(end: socket.socket) -> bool:
    end.settimeout(NOTHING_S)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(SOON_S)
    return False


def test_all_eight_link_faults_are_present() -> None:
    slow = ["latency", "jitter", "rate", "one-byte slices"]
    assert [*FAULTS] == [*slow, "reset", "half-open", "black hole", "mid-frame"]


@pytest.mark.parametrize("name", ["latency", "jitter", "rate", "one-byte slices"])
def test_slow_link_delivers_every_byte_in_order_both_ways(ends: Ends, name: str) -> None:
    ends.link.fault(FAULTS[name])
    ends.client.sendall(DATA * 100)
    assert received(ends.server, 1000) == DATA * 100
    ends.server.sendall(DATA * 10)
    assert received(ends.client, 100) == DATA * 10
    assert ends.link.met


@pytest.mark.parametrize(("name", "size_bytes", "least_s"), [("latency", 10, 0.05), ("rate", 4000, 0.15)])
def test_slow_link_delays_delivery(ends: Ends, name: str, size_bytes: int, least_s: float) -> None:
    ends.link.fault(FAULTS[name])
    begun_s = time.monotonic()
    ends.client.sendall(bytes(size_bytes))
    received(ends.server, size_bytes)
    assert time.monotonic() - begun_s >= least_s


def test_reset_reaches_both_ends(ends: Ends) -> None:
    ends.link.fault(FAULTS["reset"])
    ends.client.sendall(DATA)
    for end in (ends.client, ends.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_half_open_connection_is_not_reported_to_the_server(ends: Ends) -> None:
    ends.link.fault(FAULTS["half-open"])
    ends.client.sendall(DATA)
    with pytest.raises(ConnectionResetError):
        ends.client.recv(1)
    ends.server.sendall(DATA)
    assert is_silent(ends.server)
    ends.link.heal()
    assert ends.server.recv(1) == b""


def test_black_hole_swallows_all_bytes_silently_until_healed(ends: Ends) -> None:
    ends.link.fault(FAULTS["black hole"])
    ends.client.sendall(DATA)
    ends.server.sendall(DATA)
    assert is_silent(ends.server)
    assert is_silent(ends.client)
    ends.link.heal()
    assert ends.client.recv(1) == b""
    assert ends.server.recv(1) == b""


def test_mid_frame_break_delivers_half_of_the_frame(ends: Ends) -> None:
    ends.link.fault(FAULTS["mid-frame"])
    ends.client.sendall(DATA)
    assert received(ends.server, len(DATA)) == DATA[:5]
    assert ends.client.recv(1) == b""


def test_healed_link_carries_new_connections(ends: Ends) -> None:
    ends.link.fault(FAULTS["reset"])
    ends.client.sendall(DATA)
    ends.link.fault(WELL)
    client, server = ends.connect()
    with client, server:
        client.sendall(DATA)
        assert received(server, len(DATA)) == DATA
