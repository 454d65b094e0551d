"""Passwords and hashes of passwords in the settings."""

from __future__ import annotations

from bascule.amqp.verifiers import DIGESTS, SCRAM_SHA_256, Verifier
from bascule.config.fields import check_secret


def is_hash(password: str) -> bool:
    """Return whether the text is a hash of a password."""
    return password.startswith(tuple(f"{mechanism}$" for mechanism in DIGESTS))


def read_password(value: str) -> str:
    """Return a password or a valid hash; ``file:PATH`` reads either from a file. Raises ValueError."""
    password = check_secret(value)
    if is_hash(password) and Verifier.parse(password).mechanism != SCRAM_SHA_256:
        raise ValueError(f"a hash in the settings must be for {SCRAM_SHA_256}; broker.users_file has hashes for all mechanisms")
    return password
