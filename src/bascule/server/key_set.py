"""The keys of a provider of tokens: cached, refreshed beside the event loop, and waited for if a token has a new key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from jwt import PyJWK

from bascule.core.log import get_log
from bascule.server.key_source import FETCH_S, KeySource, KeySourceUnavailable
from bascule.threads.background import in_background
from bascule.threads.lasting import end_process, lasting_task

log = get_log(__name__)

#: Shortest interval between two attempts to read the key set. Anybody can send tokens with unknown keys, and the provider must not suffer.
READ_INTERVAL_S: Final = 5.0
#: How long a login with an unknown key waits for the next key set, at most half of the time for a handshake.
KEY_WAIT_S: Final = READ_INTERVAL_S + 1.0
#: Keys of a key set. Providers have two or three of each algorithm.
KEYS_MAX: Final = 100
#: Characters of the name of a key.
KEY_ID_LENGTH_MAX: Final = 500
#: Bits of an RSA key, the minimum of RFC 7518, section 3.3.
RSA_BITS_MIN: Final = 2048
#: The begin of the name of an algorithm -> the type of its keys. Keys of the type "oct" are secrets, and no secret is accepted.
KEY_TYPES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
#: The curve of each algorithm with elliptic curves (RFC 7518, section 3.4); EdDSA has two.
CURVES: Final = {"ES256": ("P-256",), "ES384": ("P-384",), "ES512": ("P-521",), "EdDSA": ("Ed25519", "Ed448")}


class TokenKey(NamedTuple):
    """One public key, for one algorithm of signatures."""

    key_id: str
    algorithm: str
    key: Any


class KeySet:
    """The keys by which tokens are checked. All methods run on the event loop; only the source is read on a thread."""

    def __init__(self, source: KeySource, algorithms: Sequence[str], refresh_s: float) -> None:
        self._source = source
        self._algorithms = tuple(algorithms)
        self._refresh_s = refresh_s
        self._keys: tuple[TokenKey, ...] = ()
        self._wanted = asyncio.Event()
        self._read = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.failure = ""  # of the last attempt to read

    def start(self) -> None:
        """Begin to read the key set, again and again."""
        self._task = lasting_task(self._keep_current(), "key-set", on_failure=end_process)

    def read_from(self, source: KeySource) -> None:
        """Read the key set from another source, soon and from then on. The keys stay until then."""
        self._source = source
        self._wanted.set()

    def end(self) -> None:
        """Stop reading, without waiting for the end."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Stop reading."""
        self.end()
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task

    def find(self, key_id: str | None, algorithm: str) -> list[TokenKey]:
        """Return the keys for a token with this key id, or without one."""
        return [key for key in self._keys if key.algorithm == algorithm and key_id in (None, key.key_id)]

    async def wait(self, key_id: str | None, algorithm: str, timeout_s: float) -> None:
        """Return when there is a key for a token, or when the time is over."""
        if self.find(key_id, algorithm):
            return
        self._wanted.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._read:
                await self._read.wait_for(lambda: self.find(key_id, algorithm))

    async def _keep_current(self) -> None:
        while True:
            self._wanted.clear()
            await self._update()
            await asyncio.sleep(READ_INTERVAL_S)
            with suppress(TimeoutError):
                # After a failure the next attempt follows at once: logins may wait for it.
                async with asyncio.timeout(0 if self.failure else self._refresh_s - READ_INTERVAL_S):
                    await self._wanted.wait()

    async def _update(self) -> None:
        """Read the key set once. If this fails, the keys stay as they are."""
        try:
            keys = tuple(keys_of(await self._document(), self._algorithms))
            if not keys:
                raise KeySourceUnavailable("the key set has no public key for broker.oidc.algorithms")
        except Exception as error:  # also if the process can start no thread at the moment
            expected = isinstance(error, KeySourceUnavailable)
            if not self.failure:
                log.warning(
                    "keys of tokens not read, known keys remain valid", reason=error if expected else repr(error), keys=len(self._keys),
                    exc_info=None if expected else error,
                )  # fmt: skip
            self.failure = str(error) if expected else repr(error)
            return
        if self.failure or [key[:2] for key in keys] != [key[:2] for key in self._keys]:
            log.info("keys of tokens read", keys=len(keys))
        self.failure = ""
        self._keys = keys
        async with self._read:
            self._read.notify_all()

    async def _document(self) -> dict[str, Any]:
        source = self._source  # ``read_from`` may replace it meanwhile
        reading = asyncio.wrap_future(in_background(source.read, "key-set"))
        try:
            while not (await asyncio.wait((reading,), timeout=FETCH_S))[0]:
                source.cut()
        except asyncio.CancelledError:
            source.cut()
            raise
        return reading.result()


def keys_of(document: dict[str, Any], algorithms: Sequence[str]) -> Iterator[TokenKey]:
    """Yield the public keys in a JSON Web Key Set (RFC 7517), each for the algorithms that it may be used with.

    Keys that cannot be used are skipped, as the RFC says. Raises KeySourceUnavailable if the document is no key set.
    """
    found = document.get("keys")
    if not isinstance(found, list) or len(found) > KEYS_MAX:
        raise KeySourceUnavailable(f"the key set has no list of at most {KEYS_MAX} keys")
    for entry in found:
        if not isinstance(entry, dict) or entry.get("use") not in (None, "sig"):
            continue
        key_id = entry.get("kid", "")
        for algorithm in algorithms:
            key = _key(entry, algorithm) if isinstance(key_id, str) else None
            if key is not None:
                yield TokenKey(key_id, algorithm, key)


def _key(entry: dict[str, Any], algorithm: str) -> Any:
    """Return the public key of an entry of a key set, or None if it is not for this algorithm."""
    right_curve = algorithm not in CURVES or entry.get("crv") in CURVES[algorithm]
    if entry.get("kty") != KEY_TYPES[algorithm[:2]] or entry.get("alg") not in (None, algorithm) or not right_curve:
        return None
    try:
        key = PyJWK({name: value for name, value in entry.items() if name != "d"}, algorithm).key
    except Exception:  # numbers that are no key, and curves that OpenSSL lacks, make PyJWT and cryptography raise many errors
        return None
    return key if getattr(key, "key_size", RSA_BITS_MIN) >= RSA_BITS_MIN or KEY_TYPES[algorithm[:2]] != "RSA" else None
