"""Broker URLs: ``amqp://``, ``amqps://`` and ``failover:(...)``, with the supported options of Qpid JMS."""

from __future__ import annotations

import random
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from bascule.core.errors import InvalidInput
from bascule.core.masking import mask_url

PORTS: Final = {"amqp": 5672, "amqps": 5671}
_FORM: Final = "use amqp://[USER:PASSWORD@]HOST[:PORT], amqps://... or failover:(URL,URL)"


class Endpoint(NamedTuple):
    """The address of a broker."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Reconnect:
    """When to reconnect. ``attempts_max`` is the number of rounds over all endpoints; -1 is unlimited."""

    initial_delay_s: float = 0.0
    delay_s: float = 0.1
    delay_max_s: float = 30.0
    multiplier: float = 2.0
    attempts_max: int = -1
    startup_attempts_max: int = -1
    randomize: bool = False


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """The parts of a broker URL. None means that the URL does not set the value. Without ``reconnect``, the client does not reconnect."""

    endpoints: tuple[Endpoint, ...]
    reconnect: Reconnect | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    client_id: str | None = None
    prefetch: int | None = None
    timeout_s: float | None = None
    populate_user_id: bool = False

    @classmethod
    def parse(cls, url: str) -> BrokerUrl:
        """Parse a URL. Raises InvalidInput with the part that is invalid."""
        failover = re.fullmatch(r"failover:(?://)?\((?P<urls>[^()]*)\)(?:\?(?P<query>.*))?", url)
        if failover is None:
            return _single(url)
        addresses = [_single(each.strip()) for each in failover["urls"].split(",")]
        endpoints = tuple(endpoint for each in addresses for endpoint in each.endpoints)
        return _with_options(replace(addresses[0], endpoints=endpoints, reconnect=Reconnect()), failover["query"] or "")


def _single(url: str) -> BrokerUrl:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:  # its text may quote a part of the password
        raise InvalidInput(f"invalid broker URL {mask_url(url)!r}: the host or the port is invalid; {_FORM}") from None
    if parts.scheme not in PORTS or not parts.hostname or parts.path.strip("/"):
        raise InvalidInput(f"invalid broker URL {mask_url(url)!r}; {_FORM}")
    user, password = (urllib.parse.unquote(part) if part else None for part in (parts.username, parts.password))
    return _with_options(BrokerUrl((Endpoint(parts.hostname, port, parts.scheme == "amqps"),), None, user, password), parts.query)


def _milliseconds(text: str) -> float:
    return int(text) / 1000


def _limited(text: str) -> float | None:
    return _milliseconds(text) if int(text) >= 0 else None


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


#: Options of Qpid JMS: the field that each option sets, and the parser of its value. Times in the URL are in ms.
_OPTIONS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "jms.username": ("user", str),
    "jms.password": ("password", str),
    "jms.clientID": ("client_id", str),
    "jms.populateJMSXUserID": ("populate_user_id", _truth),
    "jms.prefetchPolicy.all": ("prefetch", int),
    "jms.requestTimeout": ("timeout_s", _limited),
    "failover.initialReconnectDelay": ("initial_delay_s", _milliseconds),
    "failover.reconnectDelay": ("delay_s", _milliseconds),
    "failover.maxReconnectDelay": ("delay_max_s", _milliseconds),
    "failover.reconnectBackOffMultiplier": ("multiplier", float),
    "failover.maxReconnectAttempts": ("attempts_max", int),
    "failover.startupMaxReconnectAttempts": ("startup_attempts_max", int),
    "failover.randomize": ("randomize", _truth),
}


def _with_options(address: BrokerUrl, query: str) -> BrokerUrl:
    for name, text in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise InvalidInput(f"unknown URL option {name!r}; the options are {', '.join(_OPTIONS)}")
        if name.startswith("failover.") and address.reconnect is None:
            raise InvalidInput(f"URL option {name} is only valid after failover:(...)")
        to, read = _OPTIONS[name]
        try:
            value = read(text)
        except (ValueError, KeyError):
            raise InvalidInput(f"invalid value of URL option {name}: {text!r}") from None
        if name.startswith("failover.") and address.reconnect is not None:
            address = replace(address, reconnect=replace(address.reconnect, **{to: value}))
        else:
            address = replace(address, **{to: value})
    return address


@dataclass(slots=True)
class Plan:
    """The order and the delays of connection attempts."""

    endpoints: list[Endpoint]
    reconnect: Reconnect | None
    random: random.Random = field(default_factory=random.Random)
    _tried: int = 0  # attempts since the last success
    _ever: bool = False
    _tls_only: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note whether each address of the application has TLS."""
        self._tls_only = all(each.tls for each in self.endpoints)

    def next(self) -> tuple[Endpoint, float] | None:
        """Return the next endpoint and the delay before it in seconds, or None after the last attempt."""
        policy = self.reconnect
        turn, place = divmod(self._tried, len(self.endpoints))
        self._tried += 1
        if policy is None:
            return (self.endpoints[place], 0.0) if not self._ever and not turn else None
        limit = policy.attempts_max if self._ever or policy.startup_attempts_max < 0 else policy.startup_attempts_max
        if 0 <= limit < turn:  # the first round is not a retry
            return None
        if place == 0 and policy.randomize:
            self.random.shuffle(self.endpoints)
        delay_s = 0.0
        if place == 0 and turn:
            delay_s = min(policy.delay_s * policy.multiplier ** min(turn - 1, 60), policy.delay_max_s)
        elif place == 0 and self._ever:
            delay_s = policy.initial_delay_s
        return self.endpoints[place], delay_s

    def succeeded(self, endpoint: Endpoint) -> None:
        """Record a successful connection. The next reconnect tries the same broker first."""
        self._tried, self._ever = 0, True
        if not (self.reconnect and self.reconnect.randomize):
            self.endpoints.remove(endpoint)
            self.endpoints.insert(0, endpoint)

    def learn(self, endpoint: Endpoint) -> None:
        """Add a broker that another broker has announced.

        If the application has given only addresses with TLS, an address without TLS is not used: it would get the password in the clear.
        """
        if self.reconnect is not None and endpoint not in self.endpoints and (endpoint.tls or not self._tls_only):
            self.endpoints.append(endpoint)
