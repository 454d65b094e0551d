"""The Java peer of the tests: an error in it must reach the test."""

import pytest

from tests.support.qpid import JmsError, PeerDied, QpidPeer


def test_jms_exception_arrives_with_its_class_and_causes(qpid_peer: QpidPeer, free_port: int) -> None:
    with pytest.raises(JmsError, match="Connection refused") as caught:
        qpid_peer.connect(f"amqp://127.0.0.1:{free_port}")
    assert caught.value.name == "JMSException"
    assert any(cause.startswith("ConnectException") for cause in caught.value.linked)


def test_error_for_an_unknown_peer_command_lists_the_known_commands(qpid_peer: QpidPeer) -> None:
    with pytest.raises(JmsError, match=r"no command fly; there are \[connect"):
        qpid_peer.call("fly")


def test_killed_peer_fails_waiting_and_later_calls(free_port: int) -> None:
    with QpidPeer() as peer:
        waiting = peer.submit("connect", as_="c", url=f"failover:(amqp://127.0.0.1:{free_port})")
        peer.kill()
        with pytest.raises(PeerDied):
            waiting.result(60)
        with pytest.raises(PeerDied):
            peer.call("start", on="c")
