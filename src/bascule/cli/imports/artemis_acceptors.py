"""``<acceptors>`` of Artemis: the one listener of Bascule, and its TLS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from bascule.cli.imports.context import ImportContext, seconds, whole_number
from bascule.cli.imports.report import ImportOutcome
from bascule.cli.imports.toml_text import toml_value
from bascule.cli.imports.xml_tree import XmlNode
from bascule.config.fields import is_loopback

_URL = re.compile(r"(\w+)://([^?#]*)(?:\?([^#]*))?(?:#.*)?")
_SEPARATOR = re.compile(r"[;&]")
#: Types of key stores that are files in PEM, which Bascule reads.
_PEM: Final = ("PEM", "PEMCFG")
_ONE_LISTENER: Final = "Bascule has one AMQP listener, and takes acceptor {chosen!r}; clients of this one change their URL"
_STORE: Final = (
    "Bascule reads PEM: `keytool -importkeystore -srckeystore STORE -destkeystore store.p12 -deststoretype PKCS12`, then"
    " `openssl pkcs12 -in store.p12 -nodes -out {file}`, and import again with {option}"
)
_PARAMETER_HINTS: Final = {
    "keyStorePassword": "a PEM file needs none; for an encrypted key set broker.tls.key_password",
    "trustStorePassword": "a PEM file needs none",
    "enabledProtocols": "Bascule accepts TLS 1.2 and 1.3",
    "enabledCipherSuites": "Bascule accepts suites with forward secrecy and authenticated encryption",
    "saslMechanisms": "Bascule offers SCRAM, EXTERNAL with client certificates, OAUTHBEARER with [broker.oidc], and PLAIN with TLS",
    "saslLoginConfigScope": "Bascule has no JAAS; see broker.users_file, client certificates and [broker.oidc]",
    "securityDomain": "Bascule has no JAAS; see broker.users_file, client certificates and [broker.oidc]",
    "anycastPrefix": "Bascule takes the prefix as a part of the name: remove it from the names that clients use",
    "multicastPrefix": "Bascule takes the prefix as a part of the name: remove it from the names that clients use",
    "amqpCredits": "the broker decides how much credit a producer gets; `prefetch` and `max_messages` of [[address]] limit it",
    "amqpLowCredits": "the broker decides how much credit a producer gets",
    "amqpMinLargeMessageSize": "large messages need no setting; the largest has broker.max_message_bytes (64 MiB)",
    "maxFrameSize": "the broker's frames have a fixed limit",
    "router": "no connection routers: clients list the broker and its standbys in failover:(...)",
    "proxyProtocolEnabled": "no PROXY protocol: the broker sees the address of the proxy",
}
_NO_CLIENT_CA: Final = "clients without a certificate can connect; broker.tls.client_ca is needed: import again with --client-ca FILE.pem"
_NETWORK: Final = "a setting of Artemis' network layer; Bascule needs none"


def _connections(text: str) -> int:
    number = whole_number(text)
    if number == 0:
        raise ValueError("0 allows no connection in Artemis, and is no limit in Bascule")
    return max(number, 0)


class AcceptorUrl(NamedTuple):
    """The address of an acceptor."""

    scheme: str
    host: str
    port: str
    parameters: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> AcceptorUrl:
        """Parse the text of an acceptor, in which blanks have no meaning. Raises ValueError."""
        found = _URL.fullmatch(re.sub(r"\s+", "", text))
        if found is None:
            raise ValueError("not a URL of an acceptor, such as tcp://0.0.0.0:61616")
        host, _, port = found[2].rpartition(":")
        pairs = (each.partition("=") for each in _SEPARATOR.split(found[3] or "") if each)
        return cls(found[1].lower(), host.strip("[]"), port, {key: unquote(value) for key, _, value in pairs})

    @property
    def protocols(self) -> list[str]:
        """Return the protocols in capital letters; an acceptor without this parameter has all."""
        return [each.upper() for each in self.parameters.get("protocols", "AMQP,CORE").split(",") if each]

    @property
    def tls(self) -> bool:
        """Return whether the acceptor has TLS."""
        return self.parameters.get("sslEnabled", "").lower() == "true"

    @property
    def usable(self) -> bool:
        """Return whether AMQP clients can connect to the acceptor over TCP."""
        return self.scheme == "tcp" and "AMQP" in self.protocols

    @property
    def preference(self) -> tuple[bool, bool, bool]:
        """Return a key by which the acceptor that fits best is the greatest: TLS, then AMQP alone, then AMQP named."""
        return self.tls, self.protocols == ["AMQP"], "protocols" in self.parameters


class CertificateFiles(NamedTuple):
    """PEM files that the user of the command gives in place of key stores."""

    certificate: Path | None = None
    client_ca: Path | None = None


NO_CERTIFICATES: Final = CertificateFiles()


class ImportedListener(NamedTuple):
    """The acceptor that became the listener, and the host on which it listens."""

    node: XmlNode
    host: str


def import_acceptors(context: ImportContext, section: XmlNode, files: CertificateFiles) -> ImportedListener | None:
    """Import the acceptor that fits best, and report the others. ``take_host`` reports its host."""
    found: dict[XmlNode, AcceptorUrl] = {}
    for node in section.each("acceptor"):
        node.attribute("name")
        try:
            found[node] = AcceptorUrl.parse(node.text)
        except ValueError as error:
            context.none(node, str(error))
    usable = [node for node, url in found.items() if url.usable]
    chosen = max(usable, key=lambda node: found[node].preference, default=None)
    for node, url in found.items():
        if node is chosen:
            _AcceptorImport(context, node, url, files).run()
            continue
        if url.scheme != "tcp":
            note = "Bascule is a process of its own, and listens on TCP"
        elif not url.usable:
            note = f"Bascule speaks AMQP 1.0 only, not {', '.join(url.protocols)}; change the clients to an AMQP client"
        else:
            note = _ONE_LISTENER.format(chosen=chosen.attributes.get("name", "") if chosen else "")
        context.none(node, note)
    return None if chosen is None else ImportedListener(chosen, found[chosen].host or "0.0.0.0")


class _AcceptorImport:
    """The acceptor that becomes the listener."""

    def __init__(self, context: ImportContext, node: XmlNode, url: AcceptorUrl, files: CertificateFiles) -> None:
        self._context = context
        self._node = node
        self._url = url
        self._files = files
        self._tls: dict[str, Any] = {}

    def run(self) -> None:
        """Import the acceptor."""
        self._set("/port", self._url.port or "61616", "port", whole_number)
        for name in self._node.defaults:
            self._row(
                f"/${{{name}}}", "", ImportOutcome.TAKEN, "", "the default that the URL names; for another value import with --property"
            )
        for key, value in self._url.parameters.items():
            self._parameter(key, value)
        self._tls_files()
        if self._tls:
            self._context.draft.set_unchecked("broker", {"tls": self._tls})

    def _row(self, part: str, value: str, outcome: ImportOutcome, setting: str = "", note: str = "") -> None:
        self._context.row(self._node, part, value, outcome, setting, note)

    def _set(self, part: str, text: str, key: str, convert: Any, differs: str = "") -> None:
        try:
            value = convert(text)
            before = self._context.draft.section("broker").get(key, value)
            self._context.draft.set("broker", key, value)
        except ValueError as error:
            self._row(part, text, ImportOutcome.NONE, "", f"broker.{key} cannot have this value: {error}")
            return
        if before != value:
            differs = f"in place of {toml_value(before)}, which another element or parameter sets"
        self._row(part, text, ImportOutcome.DIFFERS if differs else ImportOutcome.TAKEN, f"broker.{key} = {toml_value(value)}", differs)

    def _parameter(self, key: str, value: str) -> None:
        part = f"?{key}"
        match key:
            case "protocols":
                others = [each for each in self._url.protocols if each != "AMQP"]
                outcome = ImportOutcome.DIFFERS if others else ImportOutcome.TAKEN
                self._row(part, value, outcome, "", f"AMQP 1.0 only: change the clients of {', '.join(others)}" if others else "")
            case "connectionsAllowed":
                self._set(part, value, "max_connections", _connections)
            case "amqpIdleTimeout" | "connectionTtl":
                self._set(part, value, "idle_timeout_s", seconds)
            case "handshake-timeout":
                self._set(part, value, "handshake_timeout_s", whole_number)
            case "amqpDuplicateDetection" if value.lower() == "true":
                self._row(part, value, ImportOutcome.TAKEN, "", "Bascule always evaluates _AMQ_DUPL_ID")
            case "sslEnabled" if not self._url.tls:
                self._row(part, value, ImportOutcome.TAKEN, "", "no TLS, as by default")
            case "sslEnabled" | "keyStorePath" | "keyStoreType" | "trustStorePath" | "trustStoreType" | "needClientAuth" | "wantClientAuth":
                pass  # _tls_files reports them
            case _:
                self._row(part, value, ImportOutcome.NONE, "", _PARAMETER_HINTS.get(key, _NETWORK))

    def _tls_files(self) -> None:
        """Import certificates. Bascule reads PEM files, which must exist."""
        parameters = self._url.parameters
        if not self._url.tls:
            for key in ("keyStorePath", "keyStoreType", "trustStorePath", "trustStoreType", "needClientAuth", "wantClientAuth"):
                if key in parameters:
                    self._row(f"?{key}", parameters[key], ImportOutcome.NONE, "", "has no effect in Artemis either, without sslEnabled")
            return
        certificate = self._file("keyStore", "certificate", self._files.certificate)
        client_ca = self._file("trustStore", "client_ca", self._files.client_ca) if certificate else None
        if certificate:
            self._row("?sslEnabled", "true", ImportOutcome.TAKEN, "[broker.tls]")
        else:
            self._row("?sslEnabled", "true", ImportOutcome.NONE, "", "no TLS without the certificate of the server; see keyStorePath")
        if client_ca is None and "trustStorePath" in parameters and not certificate:
            self._row("?trustStorePath", parameters["trustStorePath"], ImportOutcome.NONE, "", "needs the certificate of the server first")
        self._client_auth(client_ca)

    def _file(self, store: str, key: str, given: Path | None) -> Path | None:
        parameters = self._url.parameters
        path, kind = parameters.get(f"{store}Path", ""), parameters.get(f"{store}Type", "JKS").upper()
        part = f"?{store}Path"
        if f"{store}Type" in parameters:
            note = "" if kind in _PEM else "Bascule reads PEM"
            self._row(f"?{store}Type", kind, ImportOutcome.TAKEN if kind in _PEM or given else ImportOutcome.NONE, "", note)
        found = given or (Path(path) if kind == "PEM" and Path(path).is_file() else None)
        if found is not None:
            self._tls[key] = str(found)
            note = "" if given is None else "the given PEM file"
            outcome = ImportOutcome.TAKEN if given is None else ImportOutcome.DIFFERS
            self._row(part, path, outcome, f"broker.tls.{key} = {toml_value(str(found))}", note)
        elif path and kind in _PEM:
            self._row(part, path, ImportOutcome.NONE, "", f"cannot be read here; import again with --{key.replace('_', '-')} FILE.pem")
        elif path or key == "certificate":
            option = f"--{key.replace('_', '-')}"
            self._row(part, path, ImportOutcome.NONE, "", _STORE.format(file=f"{key}.pem", option=f"{option} {key}.pem"))
        return found

    def _client_auth(self, client_ca: Path | None) -> None:
        for key, word in (("needClientAuth", "required"), ("wantClientAuth", "optional")):
            value = self._url.parameters.get(key)
            if value is None:
                continue
            if value.lower() != "true":
                self._row(f"?{key}", value, ImportOutcome.TAKEN, "", "as by default")
            elif client_ca is None:
                self._row(f"?{key}", value, ImportOutcome.NONE, "", _NO_CLIENT_CA)
            else:
                self._tls["client_certificate"] = word
                self._row(f"?{key}", value, ImportOutcome.TAKEN, f'broker.tls.client_certificate = "{word}"')


def take_host(context: ImportContext, listener: ImportedListener, *, allow_insecure: bool) -> None:
    """Take the host, but keep a broker that lacks TLS or permissions on this machine, unless the user accepts the risk."""
    node, host = listener
    lack = " and ".join(
        ["[broker.tls]"] * ("tls" not in context.draft.section("broker"))
        + ["[[permission]]"] * (not list(context.draft.tables("permission")))
    )
    values: dict[str, Any] = {"host": host}
    outcome, note = ImportOutcome.TAKEN, ""
    if lack and not is_loopback(host):
        outcome = ImportOutcome.DIFFERS
        if allow_insecure:
            values["allow_insecure"] = True
            note = f"by --allow-insecure, other machines can reach the broker without {lack}"
        else:
            values["host"] = "127.0.0.1"
            note = (
                f"without {lack}, the broker listens on this machine only; set {lack} and host = {toml_value(host)}, or import again"
                " with --allow-insecure"
            )
    context.draft.set_unchecked("broker", values)
    setting = ", ".join(f"broker.{key} = {toml_value(value)}" for key, value in values.items())
    context.row(node, "/host", host, outcome, setting, note)
