"""The files of a protected embedded Kafka, without Kafka: the password, and files that cannot be written."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import stat
import time
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient

from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import NotStarted, free_port
from bascule.embedded.protection import PASSWORD_FILE, Protection, client_login
from bascule.kafka.acls import NotProtected, own_names
from tests.support.client import SOON_S
from tests.support.false_kafka import FalseKafka


def protection(directory: Path) -> Protection:
    return Protection(directory, free_port(), own_names(JournalTopics(), "bascule"))


def test_kafka_with_a_file_that_cannot_be_replaced_does_not_start_and_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "server.properties").mkdir()
    kafka = EmbeddedKafka(tmp_path, protection=protection(tmp_path))
    with pytest.raises(NotStarted, match=r"server\.properties"):
        kafka.start()
    assert not kafka.running


def test_password_is_generated_once_and_again_after_its_file_was_deleted_or_emptied(tmp_path: Path) -> None:
    file = tmp_path / PASSWORD_FILE
    passwords = [protection(tmp_path)._password() for _ in range(2)]
    assert passwords[0] == passwords[1] == file.read_text().strip()
    file.write_text("")
    assert protection(tmp_path)._password() not in ("", passwords[0])
    file.unlink()
    assert protection(tmp_path)._password() not in ("", passwords[0])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_password_file_that_is_no_text_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / PASSWORD_FILE).write_bytes(os.urandom(8) + b"\xff")
    with pytest.raises(NotProtected, match="delete it"):
        protection(tmp_path)._password()


def test_two_starts_of_kafka_have_different_passwords_of_the_node(tmp_path: Path) -> None:
    first, second = protection(tmp_path), protection(tmp_path)
    assert first.properties() != second.properties()
    assert first._node_password not in repr(first)


@pytest.mark.parametrize("mechanisms", [["SCRAM-SHA-256"], ["PLAIN"], []])
def test_false_kafka_on_the_port_gets_no_password(tmp_path: Path, mechanisms: list[str]) -> None:
    """The client proves that it knows the password, whatever Kafka asks for, and believes no Kafka that does not prove the same."""
    password = protection(tmp_path)._password()
    told: list[KafkaError] = []
    with FalseKafka(*mechanisms) as kafka:
        settings = {**client_login(tmp_path), "sasl.password": password, "bootstrap.servers": kafka.address}
        client = AdminClient({**settings, "error_cb": told.append}, logger=logging.getLogger("false kafka"))
        deadline_s = time.monotonic() + SOON_S
        while not any(error.code() == KafkaError._AUTHENTICATION for error in told):
            client.poll(0.1)
            assert time.monotonic() < deadline_s, told
        said = b"\n".join(kafka.said)
    assert kafka.proofs
    for secret in (password.encode(), base64.b64encode(password.encode()), hashlib.sha256(password.encode()).digest()):
        assert secret not in said
