"""The user that a message names (JMSXUserID): compared with the login of its sender, or set by the broker (``broker.validated_user``)."""

from __future__ import annotations

from typing import Final

from bascule.amqp.errors import MESSAGE_SIZE_EXCEEDED, UNAUTHORIZED_ACCESS, AmqpError
from bascule.jms.sections import Scan
from bascule.jms.user_id import with_user_id

#: Values of ``broker.validated_user`` besides ``check``, which refuses a message that names another user than its sender.
OFF: Final = "off"
#: Refuses a message that names no user, too.
REQUIRE: Final = "require"
#: Writes the user of the sender into each message that does not name it.
SET: Final = "set"
#: Characters of a user id that an error shows.
SHOWN_MAX: Final = 60


class UserIdRule:
    """What the broker does with the user ids of one client's messages."""

    __slots__ = ("_login", "_mode", "_user_id")

    def __init__(self, mode: str, login: str) -> None:
        """``login`` is the client's user, "" without a login. ``mode`` is ``check``, ``require`` or ``set``."""
        self._mode = mode
        self._login = login
        self._user_id = login.encode()

    @classmethod
    def of(cls, mode: str, login: str) -> UserIdRule | None:
        """Return the rule for a client; None if the broker takes user ids as they are."""
        return None if mode == OFF else cls(mode, login)

    def apply(self, body: bytes, facts: Scan, size_bytes_max: int) -> tuple[bytes, Scan]:
        """Return the message as the broker takes it, with its fields. Raises AmqpError for a message that the rule refuses."""
        named = facts.user_id or b""
        if named == self._user_id and (named or self._mode != REQUIRE):
            return body, facts
        if self._mode == SET:
            body = with_user_id(body, self._user_id)
            if len(body) > size_bytes_max:
                what = f"the message has {len(body)} bytes with the user id that the broker sets; at most {size_bytes_max} are allowed"
                raise AmqpError(MESSAGE_SIZE_EXCEEDED, what)
            return body, facts._replace(user_id=self._user_id or None)
        if named or self._mode == REQUIRE:
            raise AmqpError(UNAUTHORIZED_ACCESS, self._refusal(named))
        return body, facts

    def _refusal(self, named: bytes) -> str:
        who = f"its sender is user {self._login!r}" if self._login else "its sender has not logged in"
        setting = f"(broker.validated_user = {self._mode!r})"
        if not named:
            return f"the message names no user in user-id (JMSXUserID), and {who} {setting}"
        shown = named.decode(errors="replace")[:SHOWN_MAX]
        return f"the message names user {shown!r} in user-id (JMSXUserID), but {who} {setting}"
