"""The life of a broker process, and the consequence of each error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bascule.broker.epoch import AppendOffsetUnknown, SteppedDown
from bascule.broker.errors import BrokerFault, JournalUnavailable
from bascule.broker.node import CLIENTS_LEAVE_S, HANDOVER_SNAPSHOT_S, ElectionOutcome, NodeProtocol
from bascule.broker.states import NODE_TRANSITIONS, NodeEvent, NodeState
from bascule.core.effects import Severity, run_blocking
from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.journal.errors import DamagedRecord

SERVED = ["listen", "begin", "start", "serve", "ready"]
LEFT = ["stop listening", "close clients", "stop intake", "clients left"]
CLOSED = ["close epoch", "stop listening"]


class NodeEffectsModel:
    """The effects of bascule.broker.node.NodeEffects.

    ``happenings`` are the results of waits, in order. After the last one, the process is stopped.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.elections: list[ElectionOutcome] = []
        self.ends: list[BasculeError | None] = []
        self.starts: list[BasculeError | None] = []
        self.confirmations: list[bool] = []
        self.following: BasculeError | None = None
        self.told_to_stop = False
        self.stop_error: BasculeError | None = None
        self.elected = True
        self.room: BasculeError | None = None
        self.slow_snapshot = self.slow_clients = False
        self.pauses = 0
        self.notes: list[str] = []
        self.while_serving: Callable[[], None] = lambda: None
        self.while_leaving: Callable[[], None] = lambda: None
        self.protocol = NodeProtocol(self)

    def stopping(self) -> bool:
        if self.told_to_stop and self.stop_error is not None:
            raise self.stop_error
        return self.told_to_stop

    async def listen(self) -> None:
        self.done.append("listen")

    def stop_listening(self) -> None:
        self.done.append("stop listening")

    def begin_epoch(self) -> None:
        self.done.append("begin")

    async def close_epoch(self) -> None:
        self.done.append("close epoch")

    async def election(self, timeout_s: float | None) -> ElectionOutcome:
        if self.elections:
            return self.elections.pop(0)
        self.told_to_stop = True
        return ElectionOutcome.STOPPING

    def is_elected(self) -> bool:
        return self.elected

    async def confirmed(self) -> bool:
        return self.confirmations.pop(0) if self.confirmations else True

    async def load_ended(self) -> None:
        if self.following is not None:
            raise self.following

    async def start_epoch(self) -> None:
        self.done.append("start")
        error = self.starts.pop(0) if self.starts else None
        if error is not None:
            raise error

    def lose_election(self) -> None:
        self.done.append("lose election")

    async def serve(self) -> None:
        self.done.append("serve")

    async def epoch_end(self) -> BasculeError | None:
        self.while_serving()
        if self.ends:
            return self.ends.pop(0)
        self.told_to_stop = True
        return None

    def flush(self) -> None:
        self.done.append("flush")

    async def stop_intake(self) -> None:
        self.done.append("stop intake")

    def close_clients(self, error: BasculeError | None) -> None:
        self.done.append("close clients")

    async def clients_left(self, timeout_s: float) -> None:
        assert timeout_s == CLIENTS_LEAVE_S
        self.done.append("clients left")
        if self.slow_clients:
            raise TimeoutError

    async def hand_over(self, timeout_s: float) -> None:
        assert timeout_s == HANDOVER_SNAPSHOT_S
        self.done.append("hand over")
        self.while_leaving()
        if self.slow_snapshot:
            raise TimeoutError

    def check_room(self) -> None:
        self.done.append("check room")
        if self.room is not None:
            raise self.room

    async def pause(self, delay_s: float) -> None:
        self.pauses += 1

    def standing_by(self) -> None:
        self.done.append("standing by")

    def ready(self) -> None:
        self.done.append("ready")

    def note(self, severity: Severity, event: str, detail: str) -> None:
        self.notes.append(detail)

    def live(self) -> NodeProtocol:
        run_blocking(self.protocol.run())
        return self.protocol


@pytest.fixture
def effects() -> NodeEffectsModel:
    return NodeEffectsModel()


def test_stopping_broker_hands_over_and_ends(effects: NodeEffectsModel) -> None:
    effects.elections = [ElectionOutcome.ELECTED]
    node = effects.live()
    assert effects.done == [*SERVED, *LEFT, "flush", "hand over", *CLOSED]
    assert node.reason == "stopping"
    assert node.announced


def test_slow_hand_over_snapshot_does_not_delay_stop(effects: NodeEffectsModel) -> None:
    effects.elections, effects.slow_snapshot = [ElectionOutcome.ELECTED], True
    effects.live()
    assert effects.done[-2:] == CLOSED
    assert any("the final snapshot was not stored in time" in note for note in effects.notes)


def test_clients_that_take_too_long_do_not_hold_up_the_end(effects: NodeEffectsModel) -> None:
    effects.elections, effects.slow_clients = [ElectionOutcome.ELECTED], True
    effects.live()
    assert effects.done == [*SERVED, *LEFT, "flush", "hand over", *CLOSED]


def test_end_of_an_epoch_disconnects_clients_and_the_next_epoch_begins(effects: NodeEffectsModel) -> None:
    effects.elections = [ElectionOutcome.ELECTED, ElectionOutcome.ELECTED]
    effects.ends = [JournalUnavailable("append failed")]
    effects.live()
    first = [*SERVED, *LEFT, "check room", *CLOSED]
    assert effects.done[: len(first)] == first
    assert effects.done[len(first) : len(first) + 5] == SERVED
    assert "the epoch ends: append failed" in effects.notes
    assert effects.pauses == 0


def test_record_size_too_large_for_journal_ends_process(effects: NodeEffectsModel) -> None:
    effects.elections, effects.ends = [ElectionOutcome.ELECTED], [JournalUnavailable("append failed")]
    effects.room = BasculeError("too small")
    with pytest.raises(BasculeError, match="too small"):
        effects.live()
    assert effects.done[-2:] == CLOSED


def test_broker_that_is_not_elected_reports_that_it_stands_by(effects: NodeEffectsModel) -> None:
    effects.elections = [ElectionOutcome.TIMEOUT]
    node = effects.live()
    assert effects.done == ["listen", "begin", "standing by", *CLOSED]
    assert node.state is NodeState.STOPPED
    assert node.reason == "standing by"


def test_election_that_kafka_does_not_confirm_starts_no_epoch(effects: NodeEffectsModel) -> None:
    effects.elections, effects.confirmations = [ElectionOutcome.ELECTED], [False]
    effects.live()
    assert "start" not in effects.done
    assert effects.pauses == 1


@pytest.mark.parametrize("error", [Unavailable("no Kafka"), JournalUnavailable("append failed"), DamagedRecord("offset 3")])
def test_failed_first_start_of_epoch_ends_process(effects: NodeEffectsModel, error: BasculeError) -> None:
    effects.elections, effects.starts = [ElectionOutcome.ELECTED], [error]
    with pytest.raises(type(error)):
        effects.live()
    assert effects.done[-2:] == CLOSED
    assert "serve" not in effects.done


@pytest.mark.parametrize("error", [AppendOffsetUnknown("where"), SteppedDown("another broker has been elected"), BrokerFault("half-way")])
def test_start_that_fails_with_an_epoch_error_is_retried(effects: NodeEffectsModel, error: BasculeError) -> None:
    effects.elections, effects.starts = [ElectionOutcome.ELECTED] * 2, [error]
    effects.live()
    assert effects.done.count("start") == 2
    assert effects.pauses == 1
    assert any(str(error) in note for note in effects.notes)


@pytest.mark.parametrize("error", [Unavailable("no Kafka"), JournalUnavailable("append failed")])
def test_broker_that_has_served_retries_to_start_an_epoch(effects: NodeEffectsModel, error: BasculeError) -> None:
    effects.elections, effects.ends, effects.starts = [ElectionOutcome.ELECTED] * 3, [SteppedDown("replaced")], [None, error]
    effects.live()
    assert effects.done.count("start") == 3
    assert effects.pauses == 1


@pytest.mark.parametrize("error", [Unavailable("no Kafka"), JournalUnavailable("append failed")])
def test_elected_standby_retries_if_kafka_does_not_answer(effects: NodeEffectsModel, error: BasculeError) -> None:
    effects.elections, effects.starts = [ElectionOutcome.TIMEOUT, *[ElectionOutcome.ELECTED] * 2], [error]
    effects.live()
    assert effects.done.count("standing by") == 1
    assert effects.done.count("start") == 2
    assert effects.pauses == 1


@pytest.mark.parametrize("error", [DamagedRecord("offset 3"), InvalidInput("no such topic")])
def test_standby_ends_with_a_permanent_error(effects: NodeEffectsModel, error: BasculeError) -> None:
    effects.elections, effects.starts = [ElectionOutcome.TIMEOUT, ElectionOutcome.ELECTED], [error]
    with pytest.raises(type(error)):
        effects.live()


@pytest.mark.parametrize("error", [DamagedRecord("offset 3"), InvalidInput("no such topic")])
def test_broker_that_has_served_ends_with_a_permanent_error(effects: NodeEffectsModel, error: BasculeError) -> None:
    effects.elections, effects.ends = [ElectionOutcome.ELECTED] * 2, [SteppedDown("replaced")]
    effects.starts = [None, error]
    with pytest.raises(type(error)):
        effects.live()


def test_failed_journal_load_before_announcement_ends_process(effects: NodeEffectsModel) -> None:
    effects.elections, effects.following = [ElectionOutcome.LOAD_ENDED], Unavailable("no Kafka")
    with pytest.raises(Unavailable):
        effects.live()


def test_broker_that_has_served_retries_to_follow_the_journal(effects: NodeEffectsModel) -> None:
    effects.elections, effects.ends = [ElectionOutcome.ELECTED, ElectionOutcome.LOAD_ENDED], [SteppedDown("replaced")]
    effects.following = Unavailable("no Kafka")
    assert effects.live().state is NodeState.STOPPED
    assert effects.pauses == 1


def test_standby_retries_to_follow_the_journal(effects: NodeEffectsModel) -> None:
    effects.elections, effects.following = [ElectionOutcome.TIMEOUT, ElectionOutcome.LOAD_ENDED], Unavailable("no Kafka")
    assert effects.live().state is NodeState.STOPPED
    assert effects.pauses == 1


def test_election_lost_while_loading_ends_the_epoch_at_once(effects: NodeEffectsModel) -> None:
    effects.elections, effects.elected = [ElectionOutcome.ELECTED], False
    effects.live()
    assert effects.done.index("lose election") < effects.done.index("ready")


def test_error_that_ends_the_process_is_raised_after_an_orderly_end(effects: NodeEffectsModel) -> None:
    effects.elections, effects.stop_error = [ElectionOutcome.ELECTED], BasculeError("another broker has this name")
    with pytest.raises(BasculeError, match="another broker has this name"):
        effects.live()
    assert "hand over" in effects.done


def test_lost_election_ends_only_a_serving_epoch(effects: NodeEffectsModel) -> None:
    effects.protocol.election_lost()
    assert effects.done == []
    effects.elections = [ElectionOutcome.ELECTED]
    effects.while_serving = effects.protocol.election_lost
    effects.live()
    assert effects.done.count("lose election") == 1


def test_election_lost_during_the_hand_over_ends_the_epoch(effects: NodeEffectsModel) -> None:
    effects.elections = [ElectionOutcome.ELECTED]
    effects.while_leaving = effects.protocol.election_lost
    effects.live()
    assert effects.done[effects.done.index("hand over") + 1] == "lose election"


def test_doubt_about_the_election_disconnects_clients_until_it_ends(effects: NodeEffectsModel) -> None:
    seen: list[str] = []

    def doubt() -> None:
        node = effects.protocol
        node.election_in_doubt("Kafka has not answered for 5 s", stalled=False)
        seen.append(node.reason)
        node.election_in_doubt("", stalled=True)
        seen.append(node.reason)
        node.election_in_doubt("", stalled=False)
        seen.append(node.reason)

    effects.protocol.election_in_doubt("too early", stalled=False)
    effects.elections, effects.while_serving = [ElectionOutcome.ELECTED], doubt
    effects.live()
    assert seen == ["Kafka has not answered for 5 s"] * 2 + [""]
    assert effects.done.count("close clients") == 2
    assert "too early" not in effects.notes


def test_stalled_append_is_status_reason_until_next_confirmation(effects: NodeEffectsModel) -> None:
    seen: list[str] = []

    def stall() -> None:
        effects.protocol.stalled(JournalUnavailable("not stored"))
        seen.append(effects.protocol.reason)
        effects.protocol.confirmed()
        seen.append(effects.protocol.reason)

    effects.elections, effects.while_serving = [ElectionOutcome.ELECTED], stall
    effects.live()
    assert seen == ["not stored", ""]


def test_every_node_state_except_stopped_has_transition() -> None:
    assert {state for state, _ in NODE_TRANSITIONS} == set(NodeState) - {NodeState.STOPPED}
    assert set(NODE_TRANSITIONS.values()) == set(NodeState)


def test_event_without_transition_is_a_fault(effects: NodeEffectsModel) -> None:
    with pytest.raises(BrokerFault, match="'loaded' in state 'standing by'"):
        effects.protocol._move(NodeEvent.LOADED)
