"""Topics that Kafka does not let the bridge create or write, on a Kafka with ACLs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, AdminClient, ResourcePatternType, ResourceType
from tests.scenarios.bridge import eventually
from tests.scenarios.sparkless import Bridge, without_spark

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.admin import Denied, Topics
from bascule.pipelines.spec import Divert
from bascule.testing.journal import text_message

AUTHORIZER = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
"""


class GuardedKafka(EmbeddedKafka):
    """One that does what its ACLs say."""

    def _server_properties(self) -> str:
        return super()._server_properties() + AUTHORIZER

    def deny(self, prefix: str) -> None:
        """Nobody may create or write topics that begin so; all see them."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        binding = AclBinding(
            ResourceType.TOPIC, prefix, ResourcePatternType.PREFIXED, "User:ANONYMOUS", "*", AclOperation.DESCRIBE, AclPermissionType.ALLOW
        )
        for future in admin.create_acls([binding]).values():
            future.result()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    with GuardedKafka(tmp_path_factory.mktemp("guarded") / "kafka") as running:
        yield running


def test_a_topic_named_by_a_message_that_may_not_be_created_or_written_holds_nothing_up(
    guarded: GuardedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    bridge = Bridge(guarded, topic_prefix)
    seen, new = f"{topic_prefix}.closed.seen", f"{topic_prefix}.closed.new"
    bridge.topics.create(seen, 1, {})
    guarded.deny(f"{topic_prefix}.closed.")

    def denied() -> bool:
        try:
            Topics(bridge.pipelines.kafka).check_writable(seen)
        except Denied:
            return True
        return False

    eventually(denied, "Kafka knows the ACL")
    by_address = Divert("by-address", "#", f"{topic_prefix}.${{address}}")
    with bridge.running(by_address) as running:
        bridge.journal.start_epoch()
        for number, address in enumerate(["closed.seen", "open", "closed.new", "open", "closed.seen"]):
            bridge.journal.send(text_message(str(number)), address=address)
        bridge.journal.flush()
        running.batch()
    assert bridge.carried("open") == ["1", "3"]
    assert bridge.dead() == ["by-address: 0", "by-address: 2", "by-address: 4"]

    # A topic that the configuration names is awaited.
    for topic in (seen, new):
        with bridge.running(Divert("fixed", "#", topic)) as running:
            bridge.send("5")
            with pytest.raises(Denied, match=topic):
                running.batch()
    assert bridge.dead() == ["by-address: 0", "by-address: 2", "by-address: 4"]
