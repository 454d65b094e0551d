"""Each invalid input gets one clear error, and does not affect other clients."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.conftest import Connect
from tests.support import hostile
from tests.support.hostile import NULL
from tests.support.system import System

AMQP_HEADER = b"AMQP\x00\x01\x00\x00"
SASL_HEADER = b"AMQP\x03\x01\x00\x00"
#: A SASL init frame for ANONYMOUS.
SASL_ANONYMOUS = hostile.frame(hostile.described(0x41, hostile.listed(hostile.symbol(b"ANONYMOUS"), hostile.binary(b""))), kind=1)
TIMEOUT_S = 60.0


def talk(port: int, said: bytes) -> bytes:
    """Return what the broker answers before it closes the connection."""
    heard = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as client:
        client.sendall(said)
        try:
            while data := client.recv(4096):
                heard += data
        except ConnectionResetError:
            pass  # closed while it had unread data from this client
    return bytes(heard)


def bascule(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bascule.cli", *arguments]
    return subprocess.run(command, cwd=directory, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", SASL_HEADER),
        (b"AMQP\x00\x00\x09\x01", SASL_HEADER),
        (random.Random(1).randbytes(1000), SASL_HEADER),
        (SASL_HEADER + b"\xff" * 100, b"AMQP"),
        (SASL_HEADER + struct.pack(">IBBH", 1 << 31, 2, 1, 0), b"AMQP"),
        (SASL_HEADER + SASL_ANONYMOUS + AMQP_HEADER + random.Random(2).randbytes(1000), b"AMQP"),
        (SASL_HEADER + SASL_ANONYMOUS + AMQP_HEADER + struct.pack(">IBBH", 9, 2, 0, 0) + b"\xff", b"AMQP"),
        (SASL_HEADER + SASL_ANONYMOUS + AMQP_HEADER + bytes.fromhex("0000000c02000000005314 45".replace(" ", "")), b"AMQP"),
    ],
    ids=["HTTP", "AMQP 0.9", "noise", "noise in SASL", "a frame of 2 GiB", "noise in AMQP", "a broken frame", "a transfer before open"],
)
def test_broker_disconnects_peer_that_sends_garbage_and_serves_other_clients(
    connect_to: Connect, system: System, queue: str, said: bytes, answer: bytes
) -> None:
    before = len(system.broker.said())
    connection = connect_to(system.url)
    producer, consumer = connection.session().producer(queue), connection.session().consumer(queue)
    assert talk(system.port, said).startswith(answer)
    producer.send("unharmed")
    message = consumer.receive()
    assert message is not None
    assert message.body == "unharmed"
    assert "Traceback" not in system.broker.said()[before:]


def attach(name: bytes, source: bytes) -> bytes:
    return hostile.performative(hostile.ATTACH, hostile.string(name), hostile.uint(0), hostile.TRUE, NULL, NULL, source)


def disposition(last: bytes, state: bytes) -> bytes:
    return hostile.performative(hostile.DISPOSITION, hostile.TRUE, hostile.uint(0), last, hostile.TRUE, state)


def source(*fields: bytes) -> bytes:
    return hostile.described(hostile.SOURCE, hostile.listed(hostile.string(b"hostile"), *fields))


NOT_ASCII = hostile.string("é".encode())
COLLIDING = [b"\x98" + (number * hostile.HASH_MODULUS).to_bytes(16, "big") for number in range(5_000)]
HOSTILE = {
    "a condition that is no symbol": disposition(
        NULL, hostile.described(hostile.REJECTED, hostile.listed(hostile.described(hostile.ERROR, hostile.listed(NOT_ASCII))))
    ),
    "a filter whose name is no symbol": attach(b"link", source(*[NULL] * 6, hostile.mapped(NOT_ASCII, NULL))),
    "a surrogate in the name of a link": attach(b"\xed\xa0\x80", source()),
    "a long name of a link": attach(b"x" * 50_000, source()),
    "keys that collide": attach(b"link", source(*[NULL] * 4, hostile.mapped(*(part for key in COLLIDING for part in (key, NULL))))),
    "arrays without bytes": attach(b"link", source(*[NULL] * 4, hostile.listed(*[hostile.array(0x40, 256)] * 4_000))),
    "dispositions of wide ranges": disposition(hostile.uint(0x7FFFFFFE), hostile.described(hostile.ACCEPTED, hostile.LIST0)) * 2_000,
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_hostile_peer_harms_only_its_own_connection(connect_to: Connect, system: System, queue: str, said: bytes) -> None:
    before = len(system.broker.said())
    connection = connect_to(system.url)
    producer, consumer = connection.session().producer(queue), connection.session().consumer(queue)
    epoch = system.status()["gauges"]["epoch"]
    opening = hostile.performative(hostile.OPEN, hostile.string(b"hostile"))
    begin = hostile.performative(hostile.BEGIN, NULL, hostile.uint(0), hostile.uint(100), hostile.uint(100))
    close = hostile.performative(hostile.CLOSE)
    heard = talk(system.port, SASL_HEADER + SASL_ANONYMOUS + AMQP_HEADER + opening + begin + said + close)
    assert b"\x00\x53\x18" in heard, "no close"
    producer.send("unharmed")
    message = consumer.receive()
    assert message is not None
    assert message.body == "unharmed"
    assert system.status()["gauges"]["epoch"] == epoch
    assert "Traceback" not in system.broker.said()[before:]


@pytest.mark.slow
def test_broker_error_for_a_port_in_use_names_the_setting(system: System, tmp_path: Path) -> None:
    for setting, port in (("--amqp-port", system.port), ("--admin-port", system.admin_port)):
        ports = {"--amqp-port": 0, "--admin-port": 0, setting: port}
        done = bascule(
            tmp_path, "broker", *(str(part) for pair in ports.items() for part in pair),
            BASCULE_KAFKA__BOOTSTRAP_SERVERS=system.bootstrap, BASCULE_JOURNAL__PREFIX="port-in-use",
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (3, "")
        assert f"error: port {port} for" in done.stderr
        assert setting in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_error_for_unreachable_kafka_names_the_setting(tmp_path: Path, free_port: int) -> None:
    done = bascule(tmp_path, "broker", "--amqp-port", "0", "--admin-port", "0", BASCULE_KAFKA__BOOTSTRAP_SERVERS=f"127.0.0.1:{free_port}")
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr
    # The log comes before it: a broker that nobody protects says so.
    assert done.stderr.splitlines()[-1].startswith(f"error: no Kafka answers at 127.0.0.1:{free_port} (kafka.bootstrap_servers)")


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ("[broker]\nprot = 5672\n", ["bascule.toml", "broker.prot", "port"]),
        ('[[divert]]\nname = "d"\nfrom = "flights"\nto = "t"\nselector = "dep_delay > > 30"\n', ["bascule.toml", "selector", "column 13"]),
        ('[[divert]]\nname = "d"\nfrom = "flights"\nto = "no topic"\n', ["bascule.toml", "no topic"]),
        ("[broker\n", ["bascule.toml", "line 1"]),
    ],
    ids=["unknown setting", "wrong selector", "wrong topic", "no TOML"],
)
def test_invalid_configuration_stops_the_start_and_error_names_file_and_key(tmp_path: Path, config: str, texts: list[str]) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text(config)
    done = bascule(tmp_path, "up", "--config", str(file), "--data-dir", str(tmp_path / "data"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert [text for text in texts if text not in done.stderr] == []
    assert "Traceback" not in done.stderr
