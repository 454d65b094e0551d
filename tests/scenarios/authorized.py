"""A Kafka with ACLs and one user for each process, whose log has each decision of its authorizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from confluent_kafka.admin import AclOperation, ResourcePatternType, ResourceType

from bascule.embedded.java import Java
from bascule.embedded.kafka import LOG4J_PROPERTIES, SHORT_LIVED, EmbeddedKafka
from bascule.embedded.process import HOST, free_port
from bascule.kafka import clients
from tests.support.rights_page import Process

_LISTENER = """
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_PLAINTEXT
listener.name.secure.sasl.enabled.mechanisms=PLAIN
listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required {users};
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""
#: Kafka logs allowed requests with the level DEBUG, and denied ones with INFO.
_AUTHORIZER = "logger.auth.name=kafka.authorizer.logger\nlogger.auth.level=debug\n"
_DECISION = re.compile(
    r"Principal = User:(?P<user>\S+) is (?P<decision>Allowed|Denied) operation = (?P<operation>\w+) from host = \S+"
    r" on resource = (?P<resource>\w+):LITERAL:(?P<name>\S*) for request = (?P<request>\w+)"
)
#: Words of Kafka's log.
_RESOURCES = {"Topic": ResourceType.TOPIC, "Group": ResourceType.GROUP, "TransactionalId": ResourceType.TRANSACTIONAL_ID}


class AuthorizedKafka(EmbeddedKafka):
    """Start a Kafka with a listener for users, who have no rights before ``grant``. Each user's password is its name."""

    def __init__(self, data_dir: Path, users: Iterable[str]) -> None:
        super().__init__(data_dir, jvm_options=SHORT_LIVED)
        self._users = tuple(users)
        self._secure_port = free_port(HOST)

    @property
    def secured(self) -> str:
        """Return ``bootstrap.servers`` of the listener for users."""
        return f"{HOST}:{self._secure_port}"

    def login(self, user: str) -> dict[str, str]:
        """Return the settings with which a client logs in."""
        return {
            "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": user, "sasl.password": user,
        }  # fmt: skip

    def grant(self, user: str, process: Process, names: Mapping[str, str]) -> None:
        """Give a user the rights of a process, and no others."""
        admin = clients.admin({"bootstrap.servers": self.bootstrap})
        for future in admin.create_acls(process.bindings(f"User:{user}", names)).values():
            future.result()

    def denied(self, user: str) -> set[str]:
        """Return the requests that Kafka has denied to a user."""
        return {
            f"{found['operation']} {found['resource']} {found['name']} ({found['request']})"
            for found in self._decisions(user)
            if found["decision"] == "Denied"
        }

    def unused(self, user: str, process: Process, names: Mapping[str, str]) -> set[str]:
        """Return the rights of a process, except optional ones, that its user has not used."""
        used = {
            (_RESOURCES[found["resource"]], AclOperation[found["operation"]], found["name"])
            for found in self._decisions(user)
            if found["resource"] in _RESOURCES
        }
        return {
            f"{binding.operation.name} {binding.restype.name} {binding.name}"
            for right in process.rights
            if not right.optional
            for binding in right.bindings(f"User:{user}", names)
            if not any(
                (kind, operation) == (binding.restype, binding.operation)
                and (
                    name.startswith(binding.name) if binding.resource_pattern_type is ResourcePatternType.PREFIXED else name == binding.name
                )
                for kind, operation, name in used
            )
        }

    def _decisions(self, user: str) -> list[re.Match[str]]:
        return [found for found in _DECISION.finditer(self.log_file.read_text()) if found["user"] == user]

    def _server_properties(self) -> str:
        text = super()._server_properties()
        for name in ("listeners=", "advertised.listeners="):
            text = text.replace(f"\n{name}", f"\n{name}SECURE://{self.secured},")
        return text + _LISTENER.format(users=" ".join(f'user_{user}="{user}"' for user in self._users))

    def _java_command(self, java: Java, classpath: str) -> list[str | Path]:
        file = self.data_dir / "log4j2-authorizer.properties"
        file.write_text(LOG4J_PROPERTIES + _AUTHORIZER)
        command = super()._java_command(java, classpath)
        at = command.index("-cp")
        return [*command[:at], f"-Dlog4j2.configurationFile={file}", *command[at:]]
