"""Unused Kafka clients end with their threads. A refused client reports the reason."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.kafka import admin
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from tests.support.certificates import Authority
from tests.support.system import wait_for

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


@pytest.mark.parametrize("make", [lambda: Topics(NOBODY), lambda: TopicHistory(NOBODY, "t", 0)], ids=["topics", "history"])
def test_kafka_client_is_freed_with_its_last_user(make: Callable[[], Any]) -> None:
    gc.disable()
    try:
        gone = weakref.ref(make())
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a TLS server with an untrusted certificate."""
    certificate = Authority(tmp_path).issue("kafka")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.certificate, certificate.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    peer = listening.accept()[0]
                except OSError:
                    return
                with peer, suppress(OSError):
                    tls.wrap_socket(peer, server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_untrusted_certificate_is_reported_as_reason_of_unreachable_kafka(untrusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "REACH_TIMEOUT_S", 0.1)
    topics = Topics({"bootstrap.servers": untrusted, "security.protocol": "ssl", "log_level": 0})

    def refused() -> bool:
        topics._admin.poll(0.1)
        return bool(topics._refusals)

    wait_for(refused, "the handshake to fail")
    with pytest.raises(
        Unavailable, match=rf"no Kafka answers at {untrusted} \(kafka.bootstrap_servers\) within 0.1 s: .*certificate verify"
    ):
        topics.reach()
