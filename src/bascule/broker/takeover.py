"""Takeover from a broker whose process has ended, without IO: docs/adr/0019-challenge.md.

A standby keeps a connection to the elected broker. When the connection is lost, the standby challenges the elected broker in a topic. If
the topic has no answer, the standby removes the elected broker from the group that elects, so that Kafka elects another broker before the
session of the lost one ends. :mod:`bascule.server.takeover` performs the effects.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from bascule.broker.errors import BrokerFault
from bascule.core.effects import Severity, Timer
from bascule.core.states import Transitions

#: Pause before the elected broker is sought again. It doubles up to the maximum.
SEEK_S: Final = 1.0
SEEK_MAX_S: Final = 30.0
#: Pause before a lost connection is opened again. It doubles up to the maximum with each connection that was lost soon.
RECONNECT_S: Final = 0.1
RECONNECT_MAX_S: Final = 5.0
#: A connection that has lasted for this time, in seconds, is not one of several that were lost soon.
STEADY_S: Final = 10.0
#: A challenge that its own sender has not read after this time, in seconds, is repeated.
STORED_S: Final = 2.0
#: A timer that fires this much too late, in seconds, shows that this process was suspended: an answer may be unread.
LATE_S: Final = 0.25
#: Maximum length of a text in a message, in characters.
TEXT_MAX: Final = 500
_PORT_MAX: Final = 65535
#: More doublings make no pause longer.
_DOUBLINGS_MAX: Final = 16


class WatchState(enum.StrEnum):
    """The state of a broker as a standby that watches the elected broker."""

    SEEKING = "seeking"  # no elected broker is known, or it cannot be reached
    CONNECTING = "connecting"
    WATCHING = "watching"  # there is a connection to the elected broker
    CHALLENGING = "challenging"  # the connection was lost
    PAUSING = "pausing"  # the elected broker has answered; a pause before the next connection
    REPLACING = "replacing"  # the elected broker has not answered, and is removed from the group
    ELECTED = "elected"  # this broker itself


class WatchEvent(enum.StrEnum):
    """The events that change the state of the watch."""

    FOUND = "elected broker found"
    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    DISMISSED = "dismissed"
    LOST = "connection lost"
    ANSWERED = "challenge answered"
    PAUSED = "pause over"
    UNANSWERED = "challenge unanswered"
    OTHER_CLAIMED = "claim of another standby"
    REPLACED = "member removed"
    ELECTED = "elected"
    NOT_ELECTED = "election lost"


WATCH_TRANSITIONS: Final = Transitions(
    "watch of the elected broker",
    {
        (WatchState.SEEKING, WatchEvent.FOUND): WatchState.CONNECTING,
        (WatchState.CONNECTING, WatchEvent.FOUND): WatchState.CONNECTING,
        (WatchState.CONNECTING, WatchEvent.CONNECTED): WatchState.WATCHING,
        (WatchState.CONNECTING, WatchEvent.UNREACHABLE): WatchState.SEEKING,
        (WatchState.CONNECTING, WatchEvent.LOST): WatchState.CHALLENGING,
        (WatchState.WATCHING, WatchEvent.FOUND): WatchState.CONNECTING,
        (WatchState.WATCHING, WatchEvent.DISMISSED): WatchState.SEEKING,
        (WatchState.WATCHING, WatchEvent.LOST): WatchState.CHALLENGING,
        (WatchState.CHALLENGING, WatchEvent.ANSWERED): WatchState.PAUSING,
        (WatchState.CHALLENGING, WatchEvent.UNANSWERED): WatchState.REPLACING,
        (WatchState.CHALLENGING, WatchEvent.OTHER_CLAIMED): WatchState.SEEKING,
        (WatchState.PAUSING, WatchEvent.FOUND): WatchState.CONNECTING,
        (WatchState.PAUSING, WatchEvent.PAUSED): WatchState.CONNECTING,
        (WatchState.REPLACING, WatchEvent.REPLACED): WatchState.SEEKING,
        **{(state, WatchEvent.ELECTED): WatchState.ELECTED for state in WatchState},
        (WatchState.ELECTED, WatchEvent.NOT_ELECTED): WatchState.SEEKING,
    },
)


class MessageKind(enum.StrEnum):
    """The kind of a message between brokers."""

    CHALLENGE = "challenge"  # asks the elected broker for its address, as a sign of life
    HERE = "here"  # the answer of the elected broker
    CLAIM = "claim"  # the challenge before it had no answer in time


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message between the brokers of a journal.

    ``sender`` is the name of a process. ``challenge`` identifies a challenge of a sender. ``member`` and ``instance`` name a member of the
    group that elects: the elected broker itself in an answer, and the broker to replace in a claim.
    """

    kind: MessageKind
    sender: str
    challenge: str = ""
    instance: str = ""
    member: str = ""
    host: str = ""
    port: int = 0

    def encode(self) -> bytes:
        """Return the value of the record."""
        return json.dumps(asdict(self)).encode()


def decode(value: bytes | None) -> PeerMessage | None:
    """Return the message in a record, or None for anything else: whoever may write to the topic may write any bytes."""
    try:
        content = json.loads(value or b"")
        message = PeerMessage(**{**content, "kind": MessageKind(content["kind"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = (message.sender, message.challenge, message.instance, message.member, message.host)
    # A bool is an int for Python, but no port.
    valid = type(message.port) is int and 0 <= message.port <= _PORT_MAX
    return message if valid and all(type(text) is str and len(text) <= TEXT_MAX for text in texts) else None


class WatchEffects(Protocol):
    """The effects of a takeover."""

    def now_s(self) -> float:
        """Return the time of a clock that continues while the machine is suspended."""
        ...

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Run an action after a delay."""
        ...

    def send(self, message: PeerMessage) -> None:
        """Append a message to the topic. Every broker receives it, this one included, unless Kafka fails."""
        ...

    def here(self) -> PeerMessage:
        """Return the answer of this broker, which is elected: its member of the group and the address for standbys."""
        ...

    def connect(self, attempt: int, elected: PeerMessage) -> None:
        """Open a connection to the elected broker instead of the current one, and report its events with ``attempt``."""
        ...

    def disconnect(self) -> None:
        """Close the connection to the elected broker, if there is one."""
        ...

    def dismiss(self) -> None:
        """Tell the standbys that this broker is no longer elected, and close their connections."""
        ...

    def replace(self, elected: PeerMessage) -> None:
        """Remove a member from the group that elects, if it still is a member, and report ``replaced``."""
        ...

    def note(self, severity: Severity, event: str, detail: str) -> None:
        """Write an event to the log."""
        ...


class TakeoverProtocol:
    """The state machine of one broker: a standby watches the elected broker, and the elected broker answers challenges.

    The order of the topic decides. A claim counts if no answer lies between it and its challenge. Its sender reads its own claim before it
    acts, so an answer that was stored in time has been read by then, however late the sender reads.
    """

    def __init__(self, effects: WatchEffects, name: str, answer_s: float) -> None:
        """``name`` identifies this process. The elected broker has ``answer_s`` seconds to answer a challenge."""
        self._effects = effects
        self._name = name
        self._answer_s = answer_s
        self.state = WatchState.SEEKING
        self._elected: PeerMessage | None = None  # the answer of the elected broker, as far as is known
        self._was_reached = False  # there was a connection to it
        self._attempt = 0  # number of the current connection
        self._connected_s = 0.0
        self._losses = 0  # connections in a row that were lost soon
        self._seeks = 0  # attempts in a row without a connection
        self._sought = False  # the current search has sent its challenge
        self._challenges = 0
        self._timer: Timer | None = None

    def _move(self, event: WatchEvent) -> None:
        try:
            self.state = WATCH_TRANSITIONS[self.state, event]
        except KeyError:
            raise BrokerFault(f"watch of the elected broker: {event.value!r} in state {self.state.value!r}") from None
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, delay_s: float, action: Callable[[], None]) -> None:
        self._cancel()
        self._timer = self._effects.after(delay_s, action)

    def start(self) -> None:
        """Seek the elected broker."""
        self._seek()

    def close(self) -> None:
        """End the watch. Standbys seek another broker."""
        self._cancel()
        self._effects.disconnect()
        self._effects.dismiss()

    # -- election --------------------------------------------------------------------------------------------------------

    def elected(self) -> None:
        """Note that this broker is elected. Answer challenges from now on."""
        self._move(WatchEvent.ELECTED)
        self._attempt += 1
        self._effects.disconnect()
        self._effects.send(self._effects.here())

    def not_elected(self) -> None:
        """Note that this broker has lost the election."""
        if self.state is WatchState.ELECTED:
            self._move(WatchEvent.NOT_ELECTED)
            self._effects.dismiss()
            self._seeks = self._losses = 0
            self._forget()

    # -- search ------------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Seek the elected broker, about which nothing is known any more."""
        self._elected, self._was_reached, self._sought = None, False, False
        self._wait(_pause_s(SEEK_S, self._seeks, SEEK_MAX_S), self._seek)

    def _seek(self) -> None:
        self._sought = True
        self._seeks += 1
        self._send_challenge()
        self._wait(_pause_s(SEEK_S, self._seeks, SEEK_MAX_S), self._seek)

    def _send_challenge(self) -> None:
        self._challenges += 1
        self._effects.send(PeerMessage(MessageKind.CHALLENGE, self._name, self._challenge))

    @property
    def _challenge(self) -> str:
        return str(self._challenges)

    def _connect(self, event: WatchEvent) -> None:
        if self._elected is not None:
            self._move(event)
            self._attempt += 1
            self._effects.connect(self._attempt, self._elected)

    # -- connection to the elected broker -------------------------------------------------------------------------------------

    def connected(self, attempt: int) -> None:
        """Note that the elected broker has accepted the connection."""
        if attempt == self._attempt and self.state is WatchState.CONNECTING:
            self._move(WatchEvent.CONNECTED)
            self._was_reached, self._connected_s, self._seeks = True, self._effects.now_s(), 0

    def dismissed(self, attempt: int) -> None:
        """Note that the broker has closed the connection because it is no longer elected."""
        if attempt == self._attempt and self.state is WatchState.WATCHING:
            self._move(WatchEvent.DISMISSED)
            self._losses = 0
            self._forget()

    def lost(self, attempt: int, *, refused: bool) -> None:
        """Note the end of the connection.

        ``refused``: the other end has reset or refused it. Otherwise no connection could be made in time, which says nothing about the
        process: a suspended process, or a filter in the network, does not answer.
        """
        if attempt != self._attempt or self.state not in (WatchState.CONNECTING, WatchState.WATCHING):
            return
        if self.state is WatchState.WATCHING:
            steady = self._effects.now_s() - self._connected_s > STEADY_S
            self._losses = 1 if steady else self._losses + 1
        elif self._was_reached and refused:
            self._losses += 1
        else:
            self._move(WatchEvent.UNREACHABLE)
            self._forget()
            return
        self._move(WatchEvent.LOST)
        self._begin_challenge()

    # -- challenge -----------------------------------------------------------------------------------------------------------

    def _begin_challenge(self) -> None:
        self._send_challenge()
        self._wait(STORED_S, self._begin_challenge)

    def _unanswered(self, due_s: float) -> None:
        """Claim the place of the elected broker, unless this process was suspended."""
        if self._elected is None or self._effects.now_s() - due_s > LATE_S:
            self._begin_challenge()
            return
        self._effects.send(PeerMessage(MessageKind.CLAIM, self._name, self._challenge, self._elected.instance, self._elected.member))
        self._wait(STORED_S, self._begin_challenge)

    def replaced(self) -> None:
        """Note that the member is removed from the group, or that this has failed."""
        if self.state is WatchState.REPLACING:
            self._move(WatchEvent.REPLACED)
            self._seeks = self._losses = 0
            self._forget()

    # -- messages ------------------------------------------------------------------------------------------------------------

    def received(self, message: PeerMessage) -> None:
        """Handle a message of any broker, in the order of the topic."""
        if message.sender == self._name:
            self._received_own(message)
        elif message.kind is MessageKind.HERE:
            self._found(message)
        elif message.kind is MessageKind.CHALLENGE:
            if self.state is WatchState.ELECTED:
                self._effects.send(self._effects.here())
        elif self.state is WatchState.CHALLENGING and self._elected is not None and message.member == self._elected.member:
            self._move(WatchEvent.OTHER_CLAIMED)
            self._seeks = 0
            self._forget()

    def _received_own(self, message: PeerMessage) -> None:
        if self.state is not WatchState.CHALLENGING or message.challenge != self._challenge:
            return
        if message.kind is MessageKind.CHALLENGE:
            due_s = self._effects.now_s() + self._answer_s
            self._wait(self._answer_s, lambda: self._unanswered(due_s))
        elif message.kind is MessageKind.CLAIM and self._elected is not None:
            self._move(WatchEvent.UNANSWERED)
            elected = self._elected
            self._effects.note(Severity.WARNING, "replacing the elected broker", f"{elected.instance} has not answered a challenge")
            self._effects.replace(elected)

    def _found(self, message: PeerMessage) -> None:
        if self.state in (WatchState.REPLACING, WatchState.ELECTED):
            return
        is_new = self._elected is None or message.member != self._elected.member
        if is_new:
            self._was_reached = False
        if self.state is WatchState.CHALLENGING:
            self._elected = message
            self._move(WatchEvent.ANSWERED)
            self._effects.note(Severity.INFO, "challenge answered", f"{message.instance} is elected, only the connection to it was lost")
            pause_s = _pause_s(RECONNECT_S, self._losses - 1, RECONNECT_MAX_S)
            self._wait(pause_s, lambda: self._connect(WatchEvent.PAUSED))
        elif self._sought if self.state is WatchState.SEEKING else is_new:
            self._elected = message
            self._connect(WatchEvent.FOUND)


def _pause_s(first_s: float, doublings: int, most_s: float) -> float:
    """Return a pause that has doubled this many times, up to a maximum."""
    return min(first_s * 2.0 ** min(doublings, _DOUBLINGS_MAX), most_s)
