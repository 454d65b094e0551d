"""A Kafka that requires TLS and a password, with a second, open listener for the test itself."""

from __future__ import annotations

from pathlib import Path

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import HOST, free_port
from tests.support.certificates import STORE_PASSWORD, Authority, Certificate

USER, PASSWORD = "bascule", "balanced"

_LISTENER = """
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL
listener.name.secure.sasl.enabled.mechanisms=PLAIN
listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}="{password}";
listener.name.secure.ssl.keystore.type=PKCS12
listener.name.secure.ssl.keystore.location={store}
listener.name.secure.ssl.keystore.password={store_password}
"""


class SecuredKafka(EmbeddedKafka):
    """Start a Kafka with a listener for TLS and SASL PLAIN; ``authority`` has signed its certificate."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir)
        certificates = data_dir.parent / "certificates"
        certificates.mkdir()
        self.authority = Authority(certificates)
        self._certificate: Certificate = self.authority.issue("kafka")
        self._secure_port = free_port(HOST)

    @property
    def secured(self) -> str:
        """Return ``bootstrap.servers`` of the protected listener."""
        return f"{HOST}:{self._secure_port}"

    def _server_properties(self) -> str:
        text = super()._server_properties()
        for name in ("listeners=", "advertised.listeners="):
            text = text.replace(f"\n{name}", f"\n{name}SECURE://{self.secured},")
        return text + _LISTENER.format(user=USER, password=PASSWORD, store=self._certificate.store, store_password=STORE_PASSWORD)
