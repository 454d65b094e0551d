"""Topics that Kafka does not let the bridge create or write, on a Kafka with ACLs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from bascule.core.errors import Denied
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.pipelines.spec import DivertSpec
from tests.scenarios.bridge import eventually
from tests.scenarios.sparkless import Bridge, without_spark
from tests.support.journal import text_message

AUTHORIZER = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
"""


class GuardedKafka(EmbeddedKafka):
    """Start a Kafka that enforces ACLs."""

    def _server_properties(self) -> str:
        return super()._server_properties() + AUTHORIZER

    def deny(self, prefix: str) -> None:
        """Deny everybody to create or write topics with a prefix; all may read them."""
        admin = clients.admin({"bootstrap.servers": self.bootstrap})
        binding = AclBinding(
            ResourceType.TOPIC, prefix, ResourcePatternType.PREFIXED, "User:ANONYMOUS", "*", AclOperation.READ, AclPermissionType.ALLOW
        )
        for future in admin.create_acls([binding]).values():
            future.result()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedKafka]:
    with GuardedKafka(tmp_path_factory.mktemp("guarded") / "kafka") as running:
        yield running


@pytest.fixture
def bridge(guarded: GuardedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    without_spark(monkeypatch)
    return Bridge(guarded, topic_prefix)


def deny(kafka: GuardedKafka, bridge: Bridge, prefix: str, seen: str) -> None:
    """Return when Kafka reports a topic to its clients."""
    kafka.deny(prefix)

    def denied() -> bool:
        try:
            bridge.topics.check_writable(seen)
        except Denied:
            return True
        return False

    eventually(denied, "Kafka knows the ACL")


def send(bridge: Bridge, *sent: tuple[str, str]) -> None:
    for text, address in sent:
        bridge.journal.send(text_message(text), address=address)
    bridge.journal.flush()


@pytest.mark.slow
def test_message_for_denied_topic_is_dead_lettered_and_blocks_no_other_message(
    guarded: GuardedKafka, bridge: Bridge, topic_prefix: str
) -> None:
    seen, new = f"{topic_prefix}.closed.seen", f"{topic_prefix}.closed.new"
    bridge.topics.create(seen, 1, {})
    deny(guarded, bridge, f"{topic_prefix}.closed.", seen)
    by_address = DivertSpec("by-address", "#", f"{topic_prefix}.${{address}}")
    with bridge.running(by_address) as running:
        bridge.journal.start_epoch()
        send(bridge, ("0", "closed.seen"), ("1", "open"), ("2", "closed.new"), ("3", "open"), ("4", "closed.seen"))
        running.batch()
    assert bridge.carried("open") == ["1", "3"]
    assert bridge.dead() == ["by-address: 0", "by-address: 2", "by-address: 4"]

    # The ingress waits for a topic that is in its configuration.
    for topic in (seen, new):
        with bridge.running(DivertSpec("fixed", "#", topic)) as running:
            bridge.send("5")
            with pytest.raises(Denied, match=topic):
                running.batch()
    assert bridge.dead() == ["by-address: 0", "by-address: 2", "by-address: 4"]


def test_write_permission_revoked_from_running_pipeline_blocks_no_other_message(
    guarded: GuardedKafka, bridge: Bridge, topic_prefix: str
) -> None:
    shut, fixed = f"{topic_prefix}.shut", f"{topic_prefix}.fixed"
    with bridge.running(DivertSpec("by-address", "#", f"{topic_prefix}.${{address}}"), DivertSpec("fixed", "named", fixed)) as running:
        bridge.journal.start_epoch()
        send(bridge, ("0", "shut"), ("1", "open"), ("2", "named"))
        running.batch()
        deny(guarded, bridge, shut, shut)
        send(bridge, ("3", "shut"), ("4", "open"), ("5", "named"))
        running.batch()
        assert bridge.dead() == ["by-address: 3"]

        # The ingress waits for a topic that is in its configuration, and reports it.
        deny(guarded, bridge, fixed, fixed)
        send(bridge, ("6", "open"), ("7", "named"))
        with pytest.raises(Denied, match=fixed):
            running.batch()
    assert (bridge.carried("shut"), bridge.carried("open"), bridge.carried("fixed")) == (["0"], ["1", "4"], ["2", "5"])
    assert bridge.dead() == ["by-address: 3"]
