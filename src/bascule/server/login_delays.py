"""Delays of logins after failures, without a clock: the caller says what time it is.

A failure is a wrong password or token. Failures are counted for each pair of user and address, for each address, and for each user.

- *A pair.* After ``FREE_FAILURES`` failures the logins of a pair happen one after the other, with growing pauses.
- *An address.* After ``ADDRESS_FREE_FAILURES`` failures the logins from an address happen one after the other, with short pauses.
- *A user.* After ``USER_FREE_FAILURES`` failures each login of the user waits for a short time, whatever others do: nobody can keep the
  user out.

A login that would have to wait for more than ``DELAY_S_MAX`` is refused, and its password or token is not checked. The counts of the
address and of the user do not concern a pair that has logged in before, while its own logins succeed.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

#: Failures of a user from an address without a delay: people mistype, and an application may try a few times.
FREE_FAILURES: Final = 5
#: The first pause between two logins of a pair; each further failure doubles it, up to the longest delay.
FIRST_DELAY_S: Final = 0.25
#: Longest delay. A login must end within ``broker.handshake_timeout_s``, 10 s by default.
DELAY_S_MAX: Final = 4.0
#: Failures from an address without a delay: many machines may share an address.
ADDRESS_FREE_FAILURES: Final = 50
#: Pause between two logins from an address that guesses: 10 passwords a second.
ADDRESS_DELAY_S: Final = 0.1
#: Failures of a user from all addresses without a delay.
USER_FREE_FAILURES: Final = 50
#: Delay of a login of a user whose password many addresses guess.
USER_DELAY_S: Final = 1.0
#: Time without a failure after which a count begins again.
FORGET_S: Final = 300.0
#: Pairs, addresses and users whose failures are counted, and pairs that have logged in, each. Beyond it the oldest are forgotten.
ENTRIES_MAX: Final = 10_000
#: Longest name of a user that is kept as it is, in characters.
USER_KEY_MAX: Final = 64
#: Network of an IPv6 host: a host may use each address of its network.
IPV6_PREFIX_BITS: Final = 64


@dataclass(slots=True)
class _Failures:
    """The failures of one key."""

    count: int = 0
    last_s: float = 0.0
    next_s: float = 0.0  # when the next login may happen

    def slot(self, now_s: float, pause_s: float) -> float:
        """Return when a login may happen, at least one pause after the last failure and after the login before."""
        return max(now_s, self.last_s + pause_s, self.next_s)


class _Table(OrderedDict[str, _Failures]):
    """Failures by key; the key that was used longest ago is first."""

    def found(self, key: str, now_s: float) -> _Failures | None:
        failures = self.get(key)
        if failures is not None and now_s - failures.last_s > FORGET_S:
            del self[key]
            return None
        return failures

    def failed(self, key: str, now_s: float) -> int:
        """Count a failure, and return the number of failures."""
        failures = self.found(key, now_s)
        if failures is None:
            failures = self[key] = _Failures()
            if len(self) > ENTRIES_MAX:
                self.popitem(last=False)
        self.move_to_end(key)
        failures.count += 1
        failures.last_s = now_s
        return failures.count


class Failed(NamedTuple):
    """The numbers of failures after another one, and whether a delay begins with it."""

    of_pair: int
    of_address: int
    of_user: int
    begins: bool


class LoginDelays:
    """The failed logins of one broker."""

    def __init__(self) -> None:
        self._pairs = _Table()
        self._addresses = _Table()
        self._users = _Table()
        self._trusted: OrderedDict[str, None] = OrderedDict()  # pairs that have logged in

    def delay_s(self, user: str, address: str, now_s: float) -> float | None:
        """Return how long a login has to wait; None if it is refused. The next login of the pair or address waits for longer."""
        network, user = network_of(address), _short(user)
        pair = f"{network} {user}"
        of_pair = self._pairs.found(pair, now_s)
        due_s = now_s
        pause_s = 0.0
        if of_pair is not None and of_pair.count >= FREE_FAILURES:
            pause_s = min(FIRST_DELAY_S * 2.0 ** min(of_pair.count - FREE_FAILURES, 10), DELAY_S_MAX)
            due_s = of_pair.slot(now_s, pause_s)
        of_address = None
        if pair not in self._trusted:
            of_user = self._users.found(user, now_s)
            if of_user is not None and of_user.count >= USER_FREE_FAILURES:
                due_s = max(due_s, now_s + USER_DELAY_S)
            of_address = self._addresses.found(network, now_s)
            if of_address is not None and of_address.count >= ADDRESS_FREE_FAILURES:
                due_s = max(due_s, of_address.slot(now_s, ADDRESS_DELAY_S))
        if due_s - now_s > DELAY_S_MAX:
            return None
        if of_pair is not None:
            of_pair.next_s = due_s + pause_s
        if of_address is not None:
            of_address.next_s = due_s + ADDRESS_DELAY_S
        return due_s - now_s

    def failed(self, user: str, address: str, now_s: float) -> Failed:
        """Count a failure."""
        network, user = network_of(address), _short(user)
        pair = f"{network} {user}"
        of_pair, of_address, of_user = (
            table.failed(key, now_s) for table, key in ((self._pairs, pair), (self._addresses, network), (self._users, user))
        )
        if of_pair >= FREE_FAILURES:
            self._trusted.pop(pair, None)
        begins = of_pair == FREE_FAILURES or of_address == ADDRESS_FREE_FAILURES or of_user == USER_FREE_FAILURES
        return Failed(of_pair, of_address, of_user, begins)

    def succeeded(self, user: str, address: str) -> None:
        """Note a login that has succeeded. The failures of its pair are forgotten, those of the address and of the user are not."""
        pair = f"{network_of(address)} {_short(user)}"
        self._pairs.pop(pair, None)
        self._trusted[pair] = None
        self._trusted.move_to_end(pair)
        if len(self._trusted) > ENTRIES_MAX:
            self._trusted.popitem(last=False)


def _short(user: str) -> str:
    """Return a key for a user of limited size: a client may claim to have a name of kilobytes."""
    return user if len(user) <= USER_KEY_MAX else hashlib.sha256(user.encode(errors="replace")).hexdigest()


def network_of(address: str) -> str:
    """Return the part of an IP address that one host may have alone: an IPv4 address, or the network of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, IPV6_PREFIX_BITS), strict=False))
    return str(found)
