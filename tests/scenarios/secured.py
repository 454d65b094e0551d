"""A Kafka that requires TLS and a password or a token, with a second, open listener for the test itself."""

from __future__ import annotations

from pathlib import Path

from bascule.embedded.java import Java
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import HOST, free_port
from tests.support.certificates import STORE_PASSWORD, Authority, Certificate
from tests.support.provider import AUDIENCE, KEYS_PATH, Provider

USER, PASSWORD = "bascule", "balanced"

_LISTENER = """
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL
listener.name.secure.sasl.enabled.mechanisms={mechanisms}
listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}="{password}";
listener.name.secure.ssl.keystore.type=PKCS12
listener.name.secure.ssl.keystore.location={store}
listener.name.secure.ssl.keystore.password={store_password}
"""

_TOKENS = """
listener.name.secure.oauthbearer.sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;
listener.name.secure.oauthbearer.sasl.server.callback.handler.class=org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler
listener.name.secure.oauthbearer.sasl.oauthbearer.jwks.endpoint.url={keys}
listener.name.secure.oauthbearer.sasl.oauthbearer.expected.audience={audience}
listener.name.secure.oauthbearer.sasl.oauthbearer.expected.issuer={issuer}
"""


class SecuredKafka(EmbeddedKafka):
    """Start a Kafka with a listener for TLS, SASL PLAIN, and tokens if there is a provider. ``authority`` has signed its certificate."""

    def __init__(self, data_dir: Path, provider: Provider | None = None) -> None:
        super().__init__(data_dir)
        self._provider = provider
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
        mechanisms, provider = ("PLAIN", "") if self._provider is None else ("PLAIN,OAUTHBEARER", self._provider.issuer)
        return text + (_LISTENER + (_TOKENS if provider else "")).format(
            mechanisms=mechanisms, user=USER, password=PASSWORD, store=self._certificate.store, store_password=STORE_PASSWORD,
            keys=provider + KEYS_PATH, audience=AUDIENCE, issuer=provider,
        )  # fmt: skip

    def _java_command(self, java: Java, classpath: str) -> list[str | Path]:
        command, *options = super()._java_command(java, classpath)
        urls = [] if self._provider is None else [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self._provider.issuer}{KEYS_PATH}"]
        return [command, *urls, *options]
