"""What one user may have of a resource that all users share.

A user may have all of it while others have nothing. The last quarter is for users with less than half once others have some, and users with
little get a spare quarter beyond the limit. So nobody is kept out by a user who came first, and a user with nearly everything, such as the
only application of an installation beside a monitor, has three quarters in any order of connecting.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Final, NamedTuple

from bascule.core.user_limits import ANONYMOUS

#: Share of a limit beyond which a user gets nothing of the last part, while others have some.
USER_SHARE: Final = 0.5
#: The last part of a limit, for users within their share; and the part of it that users with no more than this have beyond the limit.
SPARE: Final = 0.25


class Beyond(enum.Enum):
    """What a request is beyond."""

    ALL = enum.auto()  # the limit of all users together
    SHARE = enum.auto()  # the share of its user, while others have some and little is left


def beyond(wanted: float, of_user: float, total: float, most: float) -> Beyond | None:
    """Return what a request for ``wanted`` more is beyond, or None if it is within the limits.

    The user has ``of_user`` of the ``total``. All together may have ``most``.
    """
    own, after = of_user + wanted, total + wanted
    if after > most and (own > SPARE * most or after > (1 + SPARE) * most):
        return Beyond.ALL
    if total > of_user and own > USER_SHARE * most and after > (1 - SPARE) * most:
        return Beyond.SHARE
    return None


def of_user_beyond(user: str) -> str:
    """Return the words of an error for a user that is beyond its share."""
    return f"of user {user or ANONYMOUS!r}, while others have some and less than a quarter is free,"


class StepsLimit(NamedTuple):
    """The limit that a subscription would exceed."""

    whose: str
    most: int


class StepsUse:
    """The steps of subscriptions by key, in total and by user."""

    __slots__ = ("_of_user", "total")

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()  # by key
        self._of_user: Counter[tuple[str, str]] = Counter()  # by key and user

    def add(self, change: int, key: str, user: str) -> None:
        """Count steps of a user, or count them no more."""
        if change:
            self.total[key] += change
            if not self.total[key]:
                del self.total[key]
            self._of_user[key, user] += change
            if not self._of_user[key, user]:
                del self._of_user[key, user]

    def beyond(self, steps: int, fewer: int, key: str, user: str, replaced: str, most: int) -> StepsLimit | None:
        """Return the limit that a user's ``steps`` would exceed, if ``fewer`` steps of the user ``replaced`` end; None if there is room."""
        of_user = self._of_user[key, user] - (fewer if replaced == user else 0)
        found = beyond(steps, of_user, self.total[key] - fewer, most)
        if found is None:
            return None
        if found is Beyond.ALL:
            return StepsLimit("all subscriptions", most)
        return StepsLimit(f"the subscriptions {of_user_beyond(user)}", int(USER_SHARE * most))
