"""The protection of the embedded Kafka from other users of the machine.

Kafka has two listeners for clients. On the plain one, everybody may use all topics except those of Bascule. On the *own* listener, Bascule
logs in with SCRAM: the password does not leave its process, and a program that listens on the port while Kafka is down does not get it.
Kafka itself uses this listener and its controller's with a password that is new at each start, because a data directory of an earlier
version has no user.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bascule.config.private_file import replace_private
from bascule.embedded.process import HOST
from bascule.kafka.acls import NotProtected, OwnNames, protect

USER: Final = "bascule"
#: The user as whom Kafka talks to itself.
_NODE: Final = "kafka"
LISTENER: Final = "OWN"
PASSWORD_FILE: Final = "password"
#: For the tools of Kafka, such as `kafka-console-consumer --command-config`.
CLIENT_FILE: Final = "client.properties"
LOCK_FILE: Final = "lock"
PORTS_FILE: Final = "ports.json"
#: Directory of Kafka in the data directory.
DIRECTORY: Final = "kafka"
#: Names in the file of ports.
PLAIN_PORT, OWN_PORT = "kafka", "kafka_own"
PASSWORD_BYTES: Final = 32
SCRAM: Final = "SCRAM-SHA-256"
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost"})

_PROPERTIES = """
# Bascule logs in on the listener OWN. ACLs protect its topics from clients without a login.
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,OWN:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT
sasl.mechanism.inter.broker.protocol=PLAIN
sasl.mechanism.controller.protocol=PLAIN
listener.name.own.sasl.enabled.mechanisms=SCRAM-SHA-256,PLAIN
listener.name.own.plain.sasl.jaas.config={node}
listener.name.own.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.controller.sasl.enabled.mechanisms=PLAIN
listener.name.controller.plain.sasl.jaas.config={node}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=false
super.users=User:{user};User:{node_user}
"""
_NODE_LOGIN = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="{0}" password="{1}" user_{0}="{1}";'
_CLIENT = """\
bootstrap.servers={bootstrap}
security.protocol=SASL_PLAINTEXT
sasl.mechanism={mechanism}
sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required username="{user}" password="{password}";
"""


@dataclass(frozen=True, slots=True)
class Protection:
    """The own listener of an embedded Kafka: its port, and the names that only its user may use."""

    directory: Path
    port: int
    names: OwnNames
    _node_password: str = field(default_factory=lambda: secrets.token_urlsafe(PASSWORD_BYTES), repr=False)

    def properties(self) -> str:
        """Return the lines for ``server.properties``, which contain a password."""
        return _PROPERTIES.format(node=_NODE_LOGIN.format(_NODE, self._node_password), user=USER, node_user=_NODE)

    def apply(self) -> None:
        """Give a Kafka that serves its ACLs and its user. Raises NotProtected, OSError."""
        password = self._password()
        login = client_login(self.directory)
        content = _CLIENT.format(bootstrap=f"{HOST}:{self.port}", mechanism=SCRAM, user=USER, password=password)
        replace_private(self.directory / CLIENT_FILE, content.encode())
        as_node = {**login, "bootstrap.servers": f"{HOST}:{self.port}", "sasl.mechanism": "PLAIN", "sasl.username": _NODE}
        protect({**as_node, "sasl.password": self._node_password}, self.names, USER, password)

    def _password(self) -> str:
        """Return the password of Bascule's user, which is generated once for a data directory."""
        file = self.directory / PASSWORD_FILE
        try:
            kept = file.read_text().strip()
        except FileNotFoundError:
            kept = ""
        except UnicodeDecodeError as error:
            raise NotProtected(f"{file} is not text; delete it, and the next start of Kafka makes another password") from error
        if not kept:
            kept = secrets.token_urlsafe(PASSWORD_BYTES)
            replace_private(file, f"{kept}\n".encode())
        return kept


def client_login(directory: Path) -> dict[str, str]:
    """Return settings of ``[kafka.client]`` with which Bascule logs in to the Kafka in ``directory``; the password stays in its file."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": SCRAM,
        "sasl.username": USER,
        "sasl.password": f"file:{directory / PASSWORD_FILE}",
    }


def own_access(data_dir: Path, kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a Kafka client with which Bascule uses its own topics.

    If ``kafka`` names the plain listener of the embedded Kafka that runs on ``data_dir``, and no login, the settings use the own listener.
    Otherwise, and if this user may not read the files of that Kafka, they are ``kafka`` itself.
    """
    directory = data_dir.absolute() / DIRECTORY
    if "security.protocol" in kafka or not _runs(directory):
        return dict(kafka)
    try:
        ports = json.loads((data_dir / PORTS_FILE).read_text())
        password = (directory / PASSWORD_FILE).read_text().strip()
        if not _is_plain(kafka["bootstrap.servers"], ports[PLAIN_PORT]):
            return dict(kafka)
        own = f"{HOST}:{ports[OWN_PORT]}"
    except (OSError, ValueError, KeyError, TypeError):  # another user's, or of an earlier version that runs unprotected
        return dict(kafka)
    return {**kafka, **client_login(directory), "bootstrap.servers": own, "sasl.password": password}


def _is_plain(servers: str, port: int) -> bool:
    host, _, given = servers.strip().rpartition(":")
    return host in _LOOPBACK and given == str(port)


def _runs(directory: Path) -> bool:
    """Return whether a Kafka runs on the directory: it holds the lock as long as it runs."""
    try:
        with (directory / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
