"""Whether other machines can reach the broker without protection."""

from __future__ import annotations

from bascule.config.fields import is_loopback


def exposure(host: str, *, tls: bool, permissions: bool) -> str | None:
    """Return what protection a broker on ``host`` lacks, and what to do; None if it has all, or only this machine can reach it."""
    missing = ["[broker.tls]"] * (not tls) + ["[[permission]]"] * (not permissions)
    if not missing or is_loopback(host):
        return None
    return (
        f"other machines can reach the broker, and there is no {' and no '.join(missing)};"
        f" set {' and '.join(missing)}, or accept the risk with allow_insecure = true"
    )
