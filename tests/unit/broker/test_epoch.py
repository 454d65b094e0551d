"""The rules of an epoch, driven step by step on a journal in memory."""

from __future__ import annotations

import pytest

from bascule.broker.containment import ErrorKind
from bascule.broker.epoch import AppendOffsetUnknown, SteppedDown
from bascule.broker.epoch_effects import EpochLimits
from bascule.broker.errors import BrokerFault, JournalUnavailable
from bascule.broker.journaling import LARGE_RECORD_BYTES, RECORD_BYTES_SOFT
from bascule.broker.states import EPOCH_TRANSITIONS, LIVE, EpochEvent, EpochState
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, Unavailable
from bascule.jms.sections import scan
from bascule.journal.errors import DamagedRecord
from bascule.journal.fence import IN_FLIGHT_MAX
from bascule.journal.offsets import UNKNOWN_OFFSET
from bascule.journal.records import Kind, decode_header
from bascule.testing.broker import Sender, message_bytes
from tests.sim.world import Promise
from tests.unit.broker.epoch_effects_model import EPOCH, FENCED, LIMITS, EpochEffectsModel, effects, record

__all__ = ["effects"]  # fixtures


# -- start -------------------------------------------------------------------------------------------------------------------


def test_epoch_serves_when_its_start_record_is_stored_and_its_state_is_loaded(effects: EpochEffectsModel) -> None:
    epoch = effects.make()
    assert (epoch.state, epoch.loaded) == (EpochState.FOLLOWING, False)
    assert effects.begin((EPOCH, None)) is None
    assert (epoch.state, epoch.loaded, epoch.next_offset) == (EpochState.SERVING, True, EPOCH + 1)
    assert epoch.engine.journaling.epoch == EPOCH
    assert [key for key, _ in effects.appended] == [b"E"]


def test_unanswered_start_record_fails_the_start(effects: EpochEffectsModel) -> None:
    epoch = effects.make()
    started = effects.process.spawn(epoch.start({}))
    effects.run(LIMITS.append_timeout_s + 0.1)
    assert str(started.error) == "journal journal: Kafka has not stored the start record within 2 s"
    assert isinstance(started.error, Unavailable)


def test_late_answer_to_the_start_record_begins_nothing(effects: EpochEffectsModel) -> None:
    epoch = effects.make()
    effects.process.spawn(epoch.start({}))
    effects.run(LIMITS.append_timeout_s + 0.1)
    epoch.outcomes([(EPOCH, None), (EPOCH + 1, None)])
    effects.run(60)
    assert epoch.state is EpochState.ENDED
    assert [type(each) for each in effects.ends] == [Unavailable]
    assert effects.asked == []


def test_appends_in_flight_never_exceed_the_limit(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    before = len(effects.appended)
    journaling = epoch.engine.journaling
    for _ in range(10):
        journaling.add(bytes(RECORD_BYTES_SOFT + 1))
    assert len(effects.appended) == before + LIMITS.in_flight_max == before + IN_FLIGHT_MAX
    assert len(journaling.in_flight) == 10
    for stored in range(1, 11):
        epoch.outcomes([(EPOCH + stored, None)])
        assert len(effects.appended) == before + min(10, LIMITS.in_flight_max + stored)
    assert not journaling.in_flight
    sequences = [decode_header(value).sequence for _, value in effects.appended[before:]]
    assert sequences == sorted(sequences)


def test_records_behind_a_large_record_wait_until_it_is_appended(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    before = len(effects.appended)
    effects.made = Promise()
    epoch.engine.journaling.add(bytes(LARGE_RECORD_BYTES))
    sender = effects.send("behind")
    effects.run()
    assert len(effects.appended) == before
    assert epoch.engine.journaling.in_flight_bytes > LARGE_RECORD_BYTES
    effects.made.keep(None)
    effects.run()
    large, behind = (value for _, value in effects.appended[before:])
    assert (decode_header(large).sequence, decode_header(behind).sequence) == (1, 2)
    assert len(large) > LARGE_RECORD_BYTES
    epoch.outcomes([(EPOCH + 1, None), (EPOCH + 2, None)])
    effects.run()
    assert sender.accepted_tokens == ["behind"]
    assert epoch.engine.journaling.in_flight_bytes == 0


@pytest.mark.parametrize("when", ["made", "appended"])
def test_large_record_that_cannot_be_appended_ends_the_epoch(effects: EpochEffectsModel, when: str) -> None:
    epoch = effects.serving()
    before = len(effects.appended)
    effects.made = Promise()
    epoch.engine.journaling.add(bytes(LARGE_RECORD_BYTES))
    sender = effects.send("behind")
    effects.run()
    if when == "made":
        effects.made.fail(MemoryError())
    else:
        effects.refusal = Unavailable("queue full")
        effects.made.keep(None)
    effects.run()
    assert len(effects.ends) == 1
    assert len(effects.appended) == before
    assert sender.accepted_tokens == []
    assert epoch.state not in LIVE


@pytest.mark.parametrize(("outcome", "error"), [((UNKNOWN_OFFSET, None), AppendOffsetUnknown), ((-1, "refused"), JournalUnavailable)])
def test_start_record_that_may_not_be_stored_ends_the_epoch_at_once(
    effects: EpochEffectsModel, outcome: tuple[int, str | None], error: type[BasculeError]
) -> None:
    epoch = effects.make()
    assert type(effects.begin(outcome)) is error
    assert epoch.state is EpochState.ENDED
    assert [type(each) for each in effects.ends] == [error]


def test_election_lost_before_start_fails_start_and_writes_nothing(effects: EpochEffectsModel) -> None:
    effects.make().lose_election()
    assert isinstance(effects.begin(), SteppedDown)
    assert effects.appended == []


def test_election_lost_during_load_fences_epoch(effects: EpochEffectsModel) -> None:
    epoch = effects.make()
    started = effects.process.spawn(epoch.start({}))
    effects.run()
    epoch.lose_election()
    effects.run()
    assert isinstance(started.error, SteppedDown)
    assert epoch.state is EpochState.FENCED


def test_failed_load_of_state_fails_start(effects: EpochEffectsModel) -> None:
    effects.make()
    effects.load_failure = DamagedRecord("offset 3")
    assert effects.begin((EPOCH, None)) is effects.load_failure


# -- outcomes ----------------------------------------------------------------------------------------------------------------


def test_sends_are_answered_in_order_when_their_records_are_stored(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    sender = effects.send("a", "b")
    assert sender.answers == []
    epoch.outcomes([(EPOCH + 1, None)])
    assert sender.accepted_tokens == ["a"]
    epoch.outcomes([(EPOCH + 2, None)])
    assert sender.accepted_tokens == ["a", "b"]
    assert epoch.next_offset == EPOCH + 3
    assert effects.rounds == 3
    assert effects.stored_bytes > 0
    assert epoch.offsets.offset_of(2) == EPOCH + 2


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ((-1, "too late"), "JournalUnavailable: journal journal: append failed: too late"),
        ((UNKNOWN_OFFSET, None), "AppendOffsetUnknown: journal journal: Kafka has stored a record and has not reported its offset"),
    ],
)
def test_append_with_unknown_place_ends_the_epoch_and_nothing_is_answered(
    effects: EpochEffectsModel, outcome: tuple[int, str | None], why: str
) -> None:
    epoch = effects.serving()
    sender = effects.send("a", "b")
    epoch.outcomes([outcome, (EPOCH + 2, None)])
    epoch.outcomes([(EPOCH + 2, None)])
    assert sender.answers == []
    assert effects.why == why
    assert epoch.state is EpochState.ENDED
    appended = len(effects.appended)
    effects.send("c")
    assert len(effects.appended) == appended


def test_append_refused_by_producer_ends_epoch(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.refusal = Unavailable("append not taken")
    effects.send("a")
    assert effects.ends == [effects.refusal]
    assert epoch.ended


def test_append_that_fails_with_an_unexpected_error_ends_the_epoch(effects: EpochEffectsModel) -> None:
    effects.serving()
    effects.refusal = MemoryError("no room for a record")
    effects.send("a")
    assert effects.why == "BrokerFault: journal journal: append failed: MemoryError('no room for a record')"


def test_error_while_a_stored_record_is_applied_ends_the_epoch(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    sender = effects.send("a")
    epoch.engine.journaling.then(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    effects.send("b")
    epoch.outcomes([(EPOCH + 1, None), (EPOCH + 2, None)])
    assert sender.accepted_tokens == ["a"]
    assert effects.why.startswith("BrokerFault: the effects of a stored record could not be applied: ZeroDivisionError")


def test_error_in_an_answer_is_contained_and_later_answers_are_sent(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    sender = effects.send("a")
    epoch.engine.journaling.tell(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    sender = effects.send("b", sender=sender)
    epoch.outcomes([(EPOCH + 1, None), (EPOCH + 2, None)])
    assert sender.accepted_tokens == ["a", "b"]
    assert effects.contained == [(ErrorKind.ANSWER, "division by zero")]
    assert not epoch.ended


def test_error_in_a_timer_is_contained_and_other_timers_run(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    done: list[str] = []
    now_ms = int(effects.world.now_ms)
    epoch.engine.schedule.at(now_ms + 100, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    epoch.engine.schedule.at(now_ms + 100, done.append, "same turn")
    epoch.engine.schedule.at(now_ms + 200, done.append, "later")
    effects.run(1)
    assert done == ["same turn", "later"]
    assert effects.contained == [(ErrorKind.TIMER, "division by zero")]
    assert not epoch.ended


def test_error_outside_the_actions_of_a_timer_ends_the_epoch(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    epoch.engine.deliveries.dirty[None] = None  # type: ignore[index]
    epoch.engine.schedule.at(int(effects.world.now_ms) + 100, lambda: None)
    effects.run(1)
    assert effects.why.startswith("BrokerFault: due work could not be done: ")


def test_record_that_cannot_be_encoded_ends_the_epoch(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    epoch.engine.journaling.batch.parts.append("no bytes")  # type: ignore[arg-type]
    epoch.flush()
    assert effects.why.startswith("BrokerFault: journal journal: a record could not be made: TypeError")


def test_records_beyond_the_limit_in_flight_are_appended_later(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.send(*"abcdef")
    assert len(effects.appended) == 1 + LIMITS.in_flight_max
    epoch.outcomes([(EPOCH + 1, None)])
    assert len(effects.appended) == 2 + LIMITS.in_flight_max


def test_small_records_wait_for_an_append_in_flight_and_are_stored_together(effects: EpochEffectsModel) -> None:
    effects.limits = EpochLimits(append_timeout_s=2.0, still_max_s=10.0, small_record_bytes=1024)
    epoch = effects.serving()
    sender = effects.send("a", "b", "c")
    assert len(effects.appended) == 2  # the start record, and the first message, which waits for nothing
    epoch.outcomes([(EPOCH + 1, None)])
    assert len(effects.appended) == 3
    epoch.outcomes([(EPOCH + 2, None)])
    assert sender.accepted_tokens == ["a", "b", "c"]


def test_record_that_is_not_small_waits_for_no_append_in_flight(effects: EpochEffectsModel) -> None:
    effects.limits = EpochLimits(append_timeout_s=2.0, still_max_s=10.0, small_record_bytes=1)
    effects.serving()
    effects.send("a", "b", "c")
    assert len(effects.appended) == 4


def test_timer_of_a_record_that_is_appended_does_not_append_the_next_one(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    appended, linger_s = len(effects.appended), LIMITS.linger_s
    effects.send("a")
    effects.run(0.8 * linger_s)
    epoch.engine.journaling.add(b"nobody waits for this entry")
    effects.run(0.8 * linger_s)
    assert len(effects.appended) == appended + 1
    effects.run(0.4 * linger_s)
    assert len(effects.appended) == appended + 2


# -- gaps ----------------------------------------------------------------------------------------------------------------------


def test_foreign_and_older_records_in_a_gap_are_skipped(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    sender = effects.send("a", "b")
    effects.between = [(6, b"not of Bascule"), (7, record(Kind.STATE, 2, 9))]
    epoch.outcomes([(8, None), (9, None)])
    assert sender.answers == []  # the gap is read first, and later outcomes wait
    effects.run()
    assert effects.asked == [(6, 8)]
    assert sender.accepted_tokens == ["a", "b"]
    assert epoch.next_offset == 10
    assert any("foreign record skipped" in note for note in effects.notes)
    assert epoch.foreign == 1


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (record(Kind.EPOCH, 0, 0), f"SteppedDown: {FENCED}"),
        (
            record(Kind.STATE, EPOCH, 1),
            "JournalUnavailable: journal journal, offset 7: Kafka has acknowledged a later record, but not this",
        ),
        (record(Kind.STATE, 2, 9)[:-1] + b"!", "DamagedRecord: journal journal, offset 7: "),
        (b"BJ\xff" + record(Kind.STATE, 2, 9)[3:], "NewerRecord: journal journal, offset 7: "),
    ],
    ids=["newer epoch", "own record", "damaged", "newer version"],
)
def test_gap_with_a_record_of_this_or_a_newer_epoch_ends_the_epoch_before_any_answer(
    effects: EpochEffectsModel, value: bytes, why: str
) -> None:
    epoch = effects.serving()
    sender = effects.send("a", "b")
    effects.between = [(7, value)]
    epoch.outcomes([(8, None), (9, None)])
    effects.run()
    assert sender.answers == []
    assert effects.why.startswith(why)
    assert epoch.state is (EpochState.FENCED if "SteppedDown" in why else EpochState.ENDED)


def test_gap_in_a_recreated_topic_ends_the_epoch(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.send("a")
    effects.other_topic = True
    epoch.outcomes([(8, None)])
    effects.run()
    assert effects.why.startswith("DamagedRecord: journal journal was recreated")


@pytest.mark.parametrize("failure", [Unavailable("no answer"), DamagedRecord("no record")])
def test_unreadable_offset_gap_ends_epoch(effects: EpochEffectsModel, failure: BasculeError) -> None:
    epoch = effects.serving()
    sender = effects.send("a")
    effects.between = failure
    epoch.outcomes([(8, None)])
    effects.run()
    assert effects.ends == [failure]
    assert sender.answers == []


# -- time ----------------------------------------------------------------------------------------------------------------------


def test_unanswered_appends_stall_the_epoch_until_an_answer_arrives(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.send("a")
    effects.run(LIMITS.append_timeout_s + 1)
    assert epoch.state is EpochState.STALLED
    (stalled,) = effects.stalls
    assert "Kafka has not stored" in str(stalled)
    assert epoch.engine.stalled is stalled
    epoch.outcomes([(EPOCH + 1, None)])
    assert epoch.state is EpochState.SERVING
    assert epoch.engine.stalled is None


def test_idle_epoch_does_not_stall(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.run(10 * LIMITS.append_timeout_s)
    assert epoch.state is EpochState.SERVING
    effects.send("a")
    effects.run(LIMITS.append_timeout_s / 2)
    assert effects.stalls == []


def test_stalled_epoch_ends_after_two_answered_probes_of_new_client(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.send("a")
    effects.reachable = [False, True, True]
    effects.run(LIMITS.append_timeout_s + 1 + LIMITS.probe_s + 1)
    assert not epoch.ended  # reached once
    effects.run(LIMITS.probe_s + 1)
    assert effects.why.endswith("Kafka answers a new client, so a new epoch starts with a new producer")


def test_stalled_epoch_stays_stalled_while_kafka_answers_nobody(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.send("a")
    effects.reachable = [True, False, True, False]
    effects.run(20 * LIMITS.probe_s)
    assert epoch.state is EpochState.STALLED


def test_error_in_probe_is_contained_and_probe_is_repeated(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.send("a")
    effects.reachable = [KeyError("min.insync.replicas")]
    effects.run(LIMITS.append_timeout_s + 1)
    assert effects.contained == [(ErrorKind.TIMER, "'min.insync.replicas'")]
    assert not epoch.ended
    effects.reachable = [True, True]
    effects.run(3 * LIMITS.probe_s)
    assert effects.why.endswith("so a new epoch starts with a new producer")


def test_append_answer_between_two_probes_resets_probe_count(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    effects.send("a", "b")
    effects.reachable = [True, True, True]
    effects.run(LIMITS.append_timeout_s + 1)
    epoch.outcomes([(EPOCH + 1, None)])
    effects.run(LIMITS.append_timeout_s + LIMITS.probe_s + 1.0)
    assert not epoch.ended
    effects.run(LIMITS.probe_s + 1)
    assert epoch.ended


def test_suspended_process_ends_its_epoch(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    sender = effects.send("a")
    effects.process.stop()
    effects.run(LIMITS.still_max_s + 1)
    effects.process.stopped = False  # the outcome arrives before any timer
    epoch.outcomes([(EPOCH + 1, None)])
    assert sender.answers == []
    assert effects.why.startswith("SteppedDown: this process was suspended for 1")
    assert not epoch.awake()


def test_timer_runs_due_actions_and_none_after_the_end(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    body = message_bytes("later", delivery_time_ms=int(effects.world.now_ms) + 1000)
    epoch.engine.send("q", Routing.ANYCAST, body, scan(body), "client", Sender(), 1)
    epoch.flush()
    epoch.outcomes([(EPOCH + 1, None)])
    queue = epoch.engine.queue("q")
    assert len(list(queue.ready)) == 0
    effects.run(1.5)
    assert len(list(queue.ready)) == 1
    epoch.close()
    assert epoch.state is EpochState.ENDED
    epoch.close()
    effects.run(60)
    assert effects.ends == []


# -- the table -----------------------------------------------------------------------------------------------------------------


def test_every_live_state_ends_by_failure_supersession_and_close() -> None:
    for state in LIVE:
        assert EPOCH_TRANSITIONS[state, EpochEvent.FAILED] is EpochState.ENDED
        assert EPOCH_TRANSITIONS[state, EpochEvent.SUPERSEDED] is EpochState.FENCED
        assert EPOCH_TRANSITIONS[state, EpochEvent.CLOSED] is EpochState.ENDED
    assert {state for state, _ in EPOCH_TRANSITIONS} == set(LIVE)


def test_event_without_transition_is_a_fault(effects: EpochEffectsModel) -> None:
    epoch = effects.serving()
    with pytest.raises(BrokerFault, match="'elected' in state 'serving'"):
        epoch.start({}).send(None)
