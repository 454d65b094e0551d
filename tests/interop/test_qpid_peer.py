"""The Java peer itself: what goes wrong in it must arrive in the test."""

import pytest

from tests.support.qpid import JmsError, PeerDied, QpidPeer


def test_what_jms_throws_arrives_with_its_class_and_causes(qpid_peer: QpidPeer, free_port: int) -> None:
    with pytest.raises(JmsError, match="Connection refused") as caught:
        qpid_peer.connect(f"amqp://127.0.0.1:{free_port}")
    assert caught.value.name == "JMSException"
    assert any(cause.startswith("ConnectException") for cause in caught.value.linked)


def test_an_unknown_command_names_those_there_are(qpid_peer: QpidPeer) -> None:
    with pytest.raises(JmsError, match=r"no command fly; there are \[connect"):
        qpid_peer.call("fly")


def test_a_killed_peer_fails_the_calls_that_wait_and_those_that_come(free_port: int) -> None:
    with QpidPeer() as peer:
        waiting = peer.submit("connect", as_="c", url=f"failover:(amqp://127.0.0.1:{free_port})")
        peer.kill()
        with pytest.raises(PeerDied):
            waiting.result(60)
        with pytest.raises(PeerDied):
            peer.call("start", on="c")
