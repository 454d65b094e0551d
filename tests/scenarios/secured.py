"""A Kafka that requires TLS and a password, a token or a client certificate, with an open listener for the test itself."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from bascule.embedded.java import Java
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from bascule.embedded.process import HOST, free_port
from bascule.kafka import clients
from tests.support.certificates import STORE_PASSWORD, Authority, Certificate
from tests.support.provider import AUDIENCE, KEYS_PATH, Provider

USER, PASSWORD = "bascule", "balanced"
TIMEOUT_S = 60

_LISTENER = """
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL,MUTUAL:SSL
listener.name.secure.sasl.enabled.mechanisms={mechanisms}
listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}="{password}";
listener.name.secure.ssl.keystore.type=PKCS12
listener.name.secure.ssl.keystore.location={store}
listener.name.secure.ssl.keystore.password={store_password}
listener.name.secure.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.mutual.ssl.keystore.type=PKCS12
listener.name.mutual.ssl.keystore.location={store}
listener.name.mutual.ssl.keystore.password={store_password}
listener.name.mutual.ssl.truststore.type=PEM
listener.name.mutual.ssl.truststore.location={authority}
listener.name.mutual.ssl.client.auth=required
"""

_TOKENS = """
listener.name.secure.oauthbearer.sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;
listener.name.secure.oauthbearer.sasl.server.callback.handler.class=org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler
listener.name.secure.oauthbearer.sasl.oauthbearer.jwks.endpoint.url={keys}
listener.name.secure.oauthbearer.sasl.oauthbearer.expected.audience={audience}
listener.name.secure.oauthbearer.sasl.oauthbearer.expected.issuer={issuer}
"""


class SecuredKafka(EmbeddedKafka):
    """Start a Kafka with a listener for TLS and SASL, and one for client certificates. ``authority`` has signed its certificate.

    The first listener accepts PLAIN, SCRAM-SHA-512 after :meth:`add_scram_user`, and tokens if there is a provider.
    """

    def __init__(self, data_dir: Path, provider: Provider | None = None) -> None:
        super().__init__(data_dir, jvm_options=SHORT_LIVED)
        self._provider = provider
        certificates = data_dir.parent / "certificates"
        certificates.mkdir()
        self.authority = Authority(certificates)
        self._certificate: Certificate = self.authority.issue("kafka")
        self._secure_port, self._mutual_port = free_port(HOST), free_port(HOST)

    @property
    def secured(self) -> str:
        """Return ``bootstrap.servers`` of the protected listener."""
        return f"{HOST}:{self._secure_port}"

    @property
    def mutual(self) -> str:
        """Return ``bootstrap.servers`` of the listener that requires a client certificate."""
        return f"{HOST}:{self._mutual_port}"

    def add_scram_user(self) -> None:
        """Let USER log in by SCRAM-SHA-512."""
        credentials = UserScramCredentialUpsertion(USER, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), PASSWORD.encode())
        admin = clients.admin({"bootstrap.servers": self.bootstrap})
        (added,) = admin.alter_user_scram_credentials([credentials]).values()
        added.result(timeout=TIMEOUT_S)

    def _server_properties(self) -> str:
        text = super()._server_properties()
        for name in ("listeners=", "advertised.listeners="):
            text = text.replace(f"\n{name}", f"\n{name}SECURE://{self.secured},MUTUAL://{self.mutual},")
        mechanisms, provider = "PLAIN,SCRAM-SHA-512", ""
        if self._provider is not None:
            mechanisms, provider = f"{mechanisms},OAUTHBEARER", self._provider.issuer
        return text + (_LISTENER + (_TOKENS if provider else "")).format(
            mechanisms=mechanisms, user=USER, password=PASSWORD, store=self._certificate.store, store_password=STORE_PASSWORD,
            authority=self.authority.certificate, keys=provider + KEYS_PATH, audience=AUDIENCE, issuer=provider,
        )  # fmt: skip

    def _java_command(self, java: Java, classpath: str) -> list[str | Path]:
        command, *options = super()._java_command(java, classpath)
        urls = [] if self._provider is None else [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self._provider.issuer}{KEYS_PATH}"]
        return [command, *urls, *options]
