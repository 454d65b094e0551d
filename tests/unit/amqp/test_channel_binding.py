"""The hash of a server's certificate for channel binding, compared with the hash that ``cryptography`` names."""

from __future__ import annotations

import datetime
import hashlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from bascule.amqp.channel_binding import server_end_point

RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


def builder(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> x509.CertificateBuilder:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    start = datetime.datetime(2026, 1, 1)
    return (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(start).not_valid_after(start + datetime.timedelta(days=1))
    )  # fmt: skip


HASHES = [hashes.SHA224(), hashes.SHA256(), hashes.SHA384(), hashes.SHA512()]


@pytest.mark.parametrize("chosen", HASHES, ids=lambda each: each.name)
@pytest.mark.parametrize("kind", ["rsa", "pss", "ecdsa"])
def test_certificate_is_hashed_with_the_hash_of_its_signature(chosen: hashes.SHA256, kind: str) -> None:
    if kind == "ecdsa":
        made = builder(EC).sign(EC, chosen)
    elif kind == "rsa":
        made = builder(RSA).sign(RSA, chosen)
    else:
        made = builder(RSA).sign(RSA, chosen, rsa_padding=padding.PSS(padding.MGF1(chosen), padding.PSS.DIGEST_LENGTH))
    der = made.public_bytes(Encoding.DER)
    assert made.signature_hash_algorithm is not None
    assert server_end_point(der) == hashlib.new(made.signature_hash_algorithm.name, der).digest()
    assert made.signature_hash_algorithm.name == chosen.name


def sha_256_instead_of(identifier: str) -> bytes:
    """Return a certificate whose signature names another algorithm; the broker does not verify its own certificate."""
    der = builder(RSA).sign(RSA, hashes.SHA256()).public_bytes(Encoding.DER)
    before, _, after = der.rpartition(bytes.fromhex("2a864886f70d01010b"))
    return before + bytes.fromhex(identifier) + after


@pytest.mark.parametrize("identifier", ["2a864886f70d010104", "2a864886f70d010105"], ids=["md5", "sha1"])
def test_certificate_with_a_weak_signature_is_hashed_with_sha_256(identifier: str) -> None:
    der = sha_256_instead_of(identifier)
    assert server_end_point(der) == hashlib.sha256(der).digest()


def test_certificate_whose_signature_has_no_hash_has_no_binding() -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    assert server_end_point(builder(key).sign(key, None).public_bytes(Encoding.DER)) is None
    assert server_end_point(sha_256_instead_of("2a864886f70d010199")) is None


@given(st.binary(max_size=80), st.integers(0, 400))
def test_damaged_certificate_has_no_binding_or_another_one(rest: bytes, cut: int) -> None:
    der = builder(EC).sign(EC, hashes.SHA256()).public_bytes(Encoding.DER)
    damaged = der[:cut] + rest
    found = server_end_point(damaged)
    assert found is None or damaged == der or found != server_end_point(der)
