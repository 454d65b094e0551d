"""A broker tells its clients the addresses for failover: an unmodified client that was given one address uses them."""

from __future__ import annotations

from pathlib import Path

from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.support.system import SHORT_SESSION, System, wait_for


def test_client_with_one_address_finds_the_standby_by_the_offered_failover_list(
    kafka: EmbeddedKafka, connect_to: Connect, queue: str, topic_prefix: str, tmp_path: Path
) -> None:
    standby = System(kafka.bootstrap, tmp_path / "standby", prefix=topic_prefix, config=SHORT_SESSION)
    offered = f'{SHORT_SESSION}failover = ["127.0.0.1:{standby.port}"]'
    with System(kafka.bootstrap, tmp_path / "active", prefix=topic_prefix, config=offered) as active:
        standby.broker.launch()
        try:
            wait_for(standby.stands_by, "the standby")
            session = connect_to(active.failover_url).session()
            producer = session.producer(queue)
            producer.send("before")
            active.broker.kill()
            producer.send("after")
            assert standby.serves()
            assert [message.body for message in session.consumer(queue).receive_many(2)] == ["before", "after"]
        finally:
            standby.broker.stop()
