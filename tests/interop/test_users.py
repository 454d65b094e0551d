"""The file of users with the Java client and the Python client: logins, changes while the broker runs, and wrong passwords."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bascule.amqp.frames import SASL_FRAME, SASL_HEADER, performative_frame
from bascule.amqp.performatives import SaslInit
from bascule.amqp.types import Symbol
from bascule.client import Queue, connect
from bascule.core.errors import BasculeError
from bascule.embedded.kafka import EmbeddedKafka
from bascule.server.login_delays import ADDRESS_FREE_FAILURES, FREE_FAILURES
from tests.interop.conftest import Connect
from tests.support.alerts import Watch
from tests.support.client import SOON_S
from tests.support.console import Console
from tests.support.qpid import JmsError
from tests.support.system import System, wait_for

COMMAND_TIMEOUT_S = 120
#: The alert fires if more than one login a second fails for this time.
ATTACK_S = 300


class Guarded(NamedTuple):
    """A broker with a file of users."""

    system: System
    file: Path

    def user(self, *arguments: str, password: str = "") -> None:
        """Run a command that changes the file."""
        command = [sys.executable, "-m", "bascule.cli", "user", *arguments, "--file", str(self.file)]
        subprocess.run(command, input=password + "\n", text=True, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)

    def add(self, name: str, *roles: str) -> str:
        """Add a user, wait until the broker knows it, and return its password."""
        before = self.readings()
        self.user("add", name, *(f"--role={role}" for role in roles), password=f"of {name}")
        wait_for(lambda: self.readings() > before, "the broker to read the file")
        return f"of {name}"

    def readings(self) -> int:
        return self.system.broker.said().count("users read again")

    def logins(self, user: str) -> list[str]:
        """Return the mechanisms of the connections of a user."""
        return [connection["mechanism"] for connection in self.system.ask("connections") if connection["user"] == user]

    def metric(self, name: str) -> float:
        return float(self.system.status()["counters"][name])


@pytest.fixture(scope="module")
def guarded(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("users")
    file = directory / "users"
    config = f"""
        [broker]
        users_file = "{file}"
        users = {{ conrad = "of the settings" }}

        [[permission]]
        match = "#"
        send = ["sales"]
        createAddress = ["sales"]
        createDurableQueue = ["sales"]

        [[permission]]
        match = "open.#"
        send = ["*"]
        consume = ["*"]
        createAddress = ["*"]
        createDurableQueue = ["*"]
    """
    found = Guarded(System(kafka.bootstrap, directory, prefix="users", config=config), file)
    found.user("add", "ann", "--role", "sales", password="hush")
    with found.system:
        yield found


@pytest.mark.parametrize(("options", "mechanism"), [
    ("", "SCRAM-SHA-512"), *((f"?amqp.saslMechanisms={name}", name) for name in ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")),
])  # fmt: skip
def test_java_client_logs_in_as_a_user_of_the_file_by_the_strongest_mechanism_or_a_chosen_one(
    options: str, mechanism: str, guarded: Guarded, connect_to: Connect, name: str
) -> None:
    connection = connect_to(f"{guarded.system.url}{options}", user="ann", password="hush")
    connection.session().producer(f"queue:open.{name}").send("kept")
    assert connection.session().consumer(f"queue:open.{name}").receive().body == "kept"
    wait_for(lambda: guarded.logins("ann") == [mechanism], "ann alone")


def test_users_of_the_settings_log_in_beside_users_of_the_file(guarded: Guarded, connect_to: Connect) -> None:
    connect_to(guarded.system.url, user="conrad", password="of the settings")
    with connect(guarded.system.url, user="ann", password="hush"):
        wait_for(lambda: guarded.logins("conrad") == guarded.logins("ann") == ["SCRAM-SHA-512"], "both")


def test_added_user_logs_in_without_a_restart_and_has_the_roles_of_the_file(guarded: Guarded, connect_to: Connect, name: str) -> None:
    connect_to(guarded.system.url, user="new", password=guarded.add("new", "sales")).session().producer(f"queue:{name}").send("x")
    with pytest.raises(JmsError, match="JMSSecurity"):
        connect_to(guarded.system.url, user="other", password=guarded.add("other")).session().producer(f"queue:{name}")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("remove", "{}"), "was removed"),
        (("passwd", "{}"), "the password of user"),
        (("roles", "{}", "shipping"), "has lost the role"),
    ],
    ids=["removed", "password", "role"],
)
def test_connections_of_a_user_end_with_the_reason_and_those_of_others_continue(
    command: tuple[str, ...], reason: str, guarded: Guarded, connect_to: Connect, name: str
) -> None:
    user, other = f"{name}.{command[0]}", connect_to(guarded.system.url, user="ann", password="hush")
    password = guarded.add(user, "sales", "shipping")
    lost = connect_to(guarded.system.url, user=user, password=password)
    python = connect(guarded.system.url, user=user, password=password)
    guarded.user(*(part.format(user) for part in command), password="changed")
    assert reason in str(lost.events(count=1))
    wait_for(lambda: not python.connected, "the Python client to notice")
    with pytest.raises(BasculeError, match=reason):
        python.send(Queue("open.any"), "x")
    other.session().producer(f"queue:{name}").send("x")
    if command[0] == "roles":
        connect_to(guarded.system.url, user=user, password=password)
    else:
        with pytest.raises(JmsError, match="JMSSecurity"):
            connect_to(guarded.system.url, user=user, password=password)


def test_damaged_file_leaves_the_users_as_they_are(guarded: Guarded, connect_to: Connect) -> None:
    stays = connect_to(guarded.system.url, user="ann", password="hush")
    right = guarded.file.read_text()
    guarded.file.write_text(right.rpartition('{"user"')[0])
    wait_for(lambda: "users not read again, the users before stay" in guarded.system.broker.said(), "the error in the log")
    assert f"{guarded.file}:" in guarded.system.broker.said()
    connect_to(guarded.system.url, user="ann", password="hush").session()
    stays.session()
    guarded.file.write_text(right)


def test_sighup_reads_the_file_although_it_has_not_changed(guarded: Guarded) -> None:
    before = guarded.readings()
    os.kill(guarded.system.broker.pid, signal.SIGHUP)
    wait_for(lambda: guarded.readings() > before, "the broker to read the file")


def guess(port: int, number: int) -> None:
    """Try a password of another user, from another address after some guesses: the broker delays those of one user or address."""
    address = (f"127.0.0.{2 + number // (ADDRESS_FREE_FAILURES - 1)}", 0)
    with socket.create_connection(("127.0.0.1", port), SOON_S, source_address=address) as connection:
        login = SaslInit(Symbol("PLAIN"), f"\0user-{number}\0guess".encode())
        connection.sendall(SASL_HEADER + performative_frame(0, login, SASL_FRAME))
        while connection.recv(1 << 16):
            pass


def test_wrong_passwords_delay_their_user_and_no_other(guarded: Guarded, connect_to: Connect) -> None:
    watch = Watch()
    watch.read(at_s=0.0, broker=guarded.system.metrics())
    failed, delayed = guarded.metric("logins_failed"), guarded.metric("logins_delayed")
    guesses = 0
    while guarded.metric("logins_delayed") == delayed:  # on a slow machine, a login may take as long as the first delays
        guesses += 1
        with pytest.raises(JmsError, match="JMSSecurity"):
            connect_to(guarded.system.url, user="nobody", password="guess")
    assert guesses > FREE_FAILURES
    assert guarded.metric("logins_failed") - failed == guesses
    connect_to(guarded.system.url, user="ann", password="hush")
    assert guarded.metric("logins_delayed") - delayed == 1
    assert "logins delayed after failures user=nobody" in guarded.system.broker.said()
    for number in range(ATTACK_S + 1):
        guess(guarded.system.port, number)
    watch.read(at_s=ATTACK_S, broker=guarded.system.metrics())
    assert watch.fires("BasculeLoginsFail")
    Console.of(guarded.system).shows("Connections", "ann SCRAM-SHA-512")
