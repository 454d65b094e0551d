"""How many prepared branches there are, in total and by user, and whether there may be another one."""

from __future__ import annotations

from collections import Counter
from typing import Final

from bascule.broker.errors import ResourceLimit
from bascule.core.user_limits import ANONYMOUS, LimitRules, UserResource

#: Limits on the number and the size of prepared branches, so that transaction managers that never return cannot fill the memory.
PREPARED_MAX = 10_000
PREPARED_BYTES_MAX = 256 << 20
#: Share of these bytes that the branches of one user may have: other users can prepare branches, whatever one user leaves behind.
PREPARED_USER_SHARE: Final = 0.25


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
        """Return why a user cannot prepare a branch of this size, or None. All branches together have at most ``bytes_max``."""
        count, of = self.count_of[user], f"of user {user or ANONYMOUS!r}"
        most, setting = limits.of(user or ANONYMOUS, UserResource.PREPARED_BRANCHES)
        if most and count >= most:
            return ResourceLimit(f"{count} branches {of} are prepared and wait for their outcome ({setting}): `recover` lists them")
        if self.count >= PREPARED_MAX:
            return ResourceLimit(f"{self.count} branches are prepared and wait for their outcome: `recover` lists them")
        limit = min(PREPARED_BYTES_MAX, bytes_max)
        limit_of_user = int(PREPARED_USER_SHARE * limit)
        size_of_user = self.bytes_of[user] + size_bytes
        if count and size_of_user > limit_of_user:
            return ResourceLimit(f"prepared branches {of} would hold {size_of_user} bytes, more than {limit_of_user}: `recover` lists them")
        if self.count and self.size_bytes + size_bytes > limit:
            total = self.size_bytes + size_bytes
            return ResourceLimit(f"prepared branches would hold {total} bytes, more than {limit}: `recover` lists them")
        return None
