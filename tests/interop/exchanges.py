"""What several tests do with a session of the Java client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.support.qpid import JmsError, Session


def exchanged(session: Session, queue: str, bodies: Sequence[str | bytes]) -> list[object]:
    """Send messages in one transaction, receive them in another one, and return their bodies. ``session`` is transacted."""
    producer = session.producer(queue)
    for body in bodies:
        producer.send(body, properties={"n": 1})
    session.commit()
    received = session.consumer(queue).receive_many(len(bodies))
    session.commit()
    return [message.body for message in received]


def security_refusal(does: Callable[[Session], object], session: Session) -> str:
    """Return the text of the security exception that an operation raises. Fails if it raises none."""
    with pytest.raises(JmsError, match="JMSSecurity") as refusal:
        does(session)
    return str(refusal.value)
