"""How many prepared branches there are, in total and by user, and whether there may be another one."""

from __future__ import annotations

from collections import Counter

from bascule.broker.errors import ResourceLimit
from bascule.broker.fair_shares import USER_SHARE, Beyond, beyond, of_user_beyond
from bascule.core.user_limits import ANONYMOUS, LimitRules, UserResource

#: Limits on the number and the size of prepared branches, so that transaction managers that never return cannot fill the memory.
PREPARED_MAX = 10_000
PREPARED_BYTES_MAX = 256 << 20


class PreparedUse:
    """The number of prepared branches, and the bytes of their journal entries. A client without a login has the user ""."""

    __slots__ = ("bytes_of", "count", "count_of", "size_bytes")

    def __init__(self) -> None:
        self.count = self.size_bytes = 0
        self.count_of: Counter[str] = Counter()  # by user
        self.bytes_of: Counter[str] = Counter()

    def add(self, user: str, size_bytes: int) -> None:
        """Count a branch."""
        self.count += 1
        self.size_bytes += size_bytes
        self.count_of[user] += 1
        self.bytes_of[user] += size_bytes

    def remove(self, user: str, size_bytes: int) -> None:
        """Count a branch no more."""
        self.count -= 1
        self.size_bytes -= size_bytes
        self.count_of[user] -= 1
        self.bytes_of[user] -= size_bytes
        if not self.count_of[user]:
            del self.count_of[user], self.bytes_of[user]

    def refusal(self, user: str, size_bytes: int, bytes_max: int, limits: LimitRules) -> ResourceLimit | None:
        """Return why a user cannot prepare a branch of this size, or None. All branches together have at most ``bytes_max``.

        The first branch of all has room whatever its size is.
        """
        count = self.count_of[user]
        most, setting = limits.of(user or ANONYMOUS, UserResource.PREPARED_BRANCHES)
        if most and count >= most:
            of = f"of user {user or ANONYMOUS!r}"
            return ResourceLimit(f"{count} branches {of} are prepared and wait for their outcome ({setting}): `recover` lists them")
        if not self.count:
            return None
        found = beyond(1, count, self.count, PREPARED_MAX)
        if found is not None:
            return _refusal(found, user, PREPARED_MAX, "branches")
        bytes_max = min(PREPARED_BYTES_MAX, bytes_max)
        found = beyond(size_bytes, self.bytes_of[user], self.size_bytes, bytes_max)
        return None if found is None else _refusal(found, user, bytes_max, "bytes")


def _refusal(found: Beyond, user: str, most: int, unit: str) -> ResourceLimit:
    whose = "prepared branches"
    if found is Beyond.SHARE:
        whose, most = f"the prepared branches {of_user_beyond(user)}", int(USER_SHARE * most)
    return ResourceLimit(f"{whose} may have {most} {unit}: end those that wait for their outcome, `recover` lists them")
