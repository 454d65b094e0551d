"""Files of TLS that change while a broker runs, the metrics, and reports of certificates that expire."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import time
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bascule.config import Settings
from bascule.config.tls import BrokerTls
from bascule.core.errors import InvalidInput
from bascule.server import tls_watch
from bascule.server.certificates import DAY_S, certificate_weaknesses
from bascule.server.tls_watch import ListenerTls, LoadedTls, TlsWatch
from tests.support.certificates import Certificate
from tests.support.signer import DAY, Signer
from tests.support.speed import SLOWNESS
from tests.support.tls_pair import handshake

SOON_S = 60.0 * SLOWNESS


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path, "authority", lasts=100 * DAY)


@pytest.fixture
def files(signer: Signer) -> Certificate:
    """Return the files of the listener."""
    return signer.issue("server", lasts=100 * DAY)


def tls_of(files: Certificate, signer: Signer) -> BrokerTls:
    return BrokerTls(certificate=files.certificate, key=files.key, client_ca=signer.certificate)


def watched(tls: BrokerTls, now_s: float | None = None) -> ListenerTls:
    return ListenerTls("broker", LoadedTls.of_broker(tls), time.time if now_s is None else lambda: now_s)


def presented(listener: ListenerTls, signer: Signer, presents: Certificate | None = None) -> str:
    """Return the certificate that the listener presents to a client."""
    client = ssl.create_default_context(cafile=signer.certificate)
    if presents is not None:
        client.load_cert_chain(presents.certificate, presents.key)
    seen = handshake(listener.context(), client).client.getpeercert(binary_form=True)
    assert seen is not None
    return ssl.DER_cert_to_PEM_cert(seen)


def looks(listener: ListenerTls) -> None:
    """Look until changed files are stable."""
    listener.look()
    listener.look()


def replace(target: Path, source: Path) -> None:
    shutil.copy(source, target.with_suffix(".new"))
    target.with_suffix(".new").replace(target)


def test_new_connections_use_new_files_once_the_key_fits_the_certificate(files: Certificate, signer: Signer) -> None:
    listener, following = watched(tls_of(files, signer)), signer.issue("following")
    before = presented(listener, signer)
    replace(files.certificate, following.certificate)
    listener.look()
    replace(files.key, following.key)
    listener.look()
    assert presented(listener, signer) == before
    listener.look()
    assert presented(listener, signer) == following.certificate.read_text()
    assert listener.up_to_date


def test_replaced_client_ca_admits_other_clients(files: Certificate, signer: Signer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Signer(tmp_path / "other", "clients")
    listener, ann = watched(tls_of(files, signer)), other.issue("ann")
    with pytest.raises(ssl.SSLError):
        presented(listener, signer, ann)
    authority = signer.certificate.read_bytes()
    signer.certificate.write_bytes(other.certificate.read_bytes())
    looks(listener)
    signer.certificate.write_bytes(authority)  # of the server, for the client
    assert presented(listener, signer, ann) == files.certificate.read_text()
    with pytest.raises(ssl.SSLError):
        presented(listener, signer, files)


@pytest.mark.parametrize("damage", ["missing", "damaged", "other key", "empty"])
def test_unusable_file_keeps_the_certificates_is_reported_once_and_mended(
    damage: str, files: Certificate, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    listener, kept = watched(tls_of(files, signer)), files.key.read_bytes()
    before = presented(listener, signer)
    if damage == "missing":
        files.key.unlink()
    else:
        content = {"damaged": b"-----BEGIN PRIVATE KEY-----\n", "other key": signer.issue("other").key.read_bytes(), "empty": b""}
        files.key.write_bytes(content[damage])
    for _ in range(3):
        looks(listener)
    assert presented(listener, signer) == before
    assert not listener.up_to_date
    assert caplog.text.count("certificates not loaded again, the certificates before stay listener=broker") == 1
    assert str(files.key) in caplog.text
    files.key.write_bytes(kept)
    looks(listener)
    assert listener.up_to_date
    assert caplog.text.count("certificates loaded again") == 1


def test_watch_loads_the_files_of_both_listeners_and_has_metrics(
    files: Certificate, signer: Signer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(tls_watch, "LOOK_S", 0.01)
    table = {"certificate": files.certificate, "key": files.key}
    watch = TlsWatch(Settings.model_validate({"broker": {"tls": {**table, "client_ca": signer.certificate}}, "admin": {"tls": table}}))
    registry = CollectorRegistry()
    registry.register(watch)

    async def until(text: str) -> None:
        async with asyncio.timeout(SOON_S):
            while caplog.text.count(text) < 2:
                await asyncio.sleep(0.01)

    watch.start()
    try:
        files.key.write_bytes(b"")
        asyncio.run(until("certificates not loaded again"))
        metrics = generate_latest(registry).decode()
        for listener in ("broker", "admin"):
            assert f'bascule_tls_last_reload_successful{{listener="{listener}"}} 0.0' in metrics
        for setting in ("broker.tls.certificate", "broker.tls.client_ca", "admin.tls.certificate"):
            (line,) = (
                each for each in metrics.splitlines() if f'bascule_certificate_expiry_timestamp_seconds{{setting="{setting}"}}' in each
            )
            assert abs(float(line.split()[-1]) - time.time() - 100 * DAY_S) < DAY_S
        following = signer.issue("following")
        replace(files.certificate, following.certificate)
        replace(files.key, following.key)
        asyncio.run(until("certificates loaded again"))
        for each in (watch.broker, watch.admin):
            assert presented(each, signer) == following.certificate.read_text()
        assert 'bascule_tls_last_reload_successful{listener="admin"} 1.0' in generate_latest(registry).decode()
    finally:
        watch.close()


def test_end_of_a_certificate_is_reported_30_7_and_1_days_ahead_and_then_each_day(
    files: Certificate, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    tls = BrokerTls(certificate=files.certificate, key=files.key)
    now_s = [time.time()]
    listener = ListenerTls("broker", LoadedTls.of_broker(tls), lambda: now_s[0])
    (end_s,) = (each.expires_s for each in listener.certificates)
    reported: list[tuple[float, str]] = []
    for quarters in range(60 * 4, -3 * 4, -1):
        now_s[0] = end_s - quarters / 4 * DAY_S
        caplog.clear()
        listener.look()
        listener.look()
        reported += ((quarters / 4, each.levelname) for each in caplog.records)
    assert reported == [(30, "WARNING"), (7, "WARNING"), (1, "WARNING"), (0, "ERROR"), (-1, "ERROR"), (-2, "ERROR")]
    assert all(text in caplog.text or not caplog.text for text in ("certificate has expired", "CN=server", str(files.certificate)))


def test_configuration_check_warns_of_each_certificate_that_is_not_valid_for_long(signer: Signer, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    old, soon = Signer(tmp_path / "old", "old", lasts=timedelta(seconds=-60)), signer.issue("soon", lasts=3 * DAY)
    later, fine = signer.issue("later", begins=DAY, lasts=99 * DAY), signer.issue("fine", lasts=99 * DAY)
    for own, authority, found in (
        (
            soon,
            old,
            [
                "broker.tls.certificate: .*soon.pem: the certificate of 'CN=soon' expires at 20",
                "broker.tls.client_ca: .*old.pem: .* expired at",
            ],
        ),
        (later, signer, ["the certificate of 'CN=later' is not valid before 20"]),
        (fine, signer, []),
    ):
        settings = Settings.model_validate(
            {"broker": {"tls": tls_of(own, authority).model_dump(include={"certificate", "key", "client_ca"})}}
        )
        weaknesses = list(certificate_weaknesses(settings, time.time()))
        assert len(weaknesses) == len(found)
        for weakness, text in zip(weaknesses, found, strict=True):
            with pytest.raises(InvalidInput, match=text):
                raise InvalidInput(weakness)


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_damaged_client_ca_ends_no_watch(text: str, files: Certificate, signer: Signer) -> None:
    listener = watched(tls_of(files, signer))
    signer.certificate.write_text(text)
    looks(listener)
    assert not listener.up_to_date


def test_client_ca_of_a_version_that_only_openssl_reads_ends_no_watch(files: Certificate, signer: Signer) -> None:
    listener = watched(tls_of(files, signer))
    content = ssl.PEM_cert_to_DER_cert(signer.certificate.read_text())
    signer.certificate.write_text(ssl.DER_cert_to_PEM_cert(content.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020107"))))
    looks(listener)
    assert listener.up_to_date
    assert {each.setting for each in listener.certificates} == {"broker.tls.certificate"}
