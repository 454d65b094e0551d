"""Crash points: every boundary between two effects has a name, at which a test can end the process as a power failure would.

    BASCULE_CRASH=journal.append.after:3 bascule broker     # SIGKILL when it comes there the third time
    BASCULE_CRASH=journal.trim.before:1:stop bascule broker # SIGSTOP: it stands still there, until somebody sends SIGCONT

Several are separated by commas; each counts its own passes, in each process that inherits the variable. With ``BASCULE_CRASH_ONCE=DIR``
each of them kills one process only and leaves a file of its name in DIR: what is started again lives. Where nothing is armed a point is
a call of an empty function. Points stand at records, batches and transactions, never at single messages.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

ARMED_VARIABLE = "BASCULE_CRASH"
ONCE_VARIABLE = "BASCULE_CRASH_ONCE"

#: Name -> what has taken effect there, and what has not.
POINTS: dict[str, str] = {
    # -- broker: an epoch's start and end
    "election.won": "Kafka has given this broker the journal; it has not begun",
    "election.confirmed": "Kafka has confirmed the election; no epoch is started",
    "epoch.start.before": "the state is being followed; the start record is not appended",
    "epoch.start.after": "the start record is stored, older epochs are fenced; the state is not whole",
    "epoch.loaded": "the state is whole; nobody is served",
    "handover.before": "a broker told to stop has let its clients go; its last snapshot is not taken",
    "handover.snapshot": "the last snapshot is there; the election is not resigned",
    "handover.resigned": "another broker may serve; this process has not ended",
    # -- broker: records
    "journal.append.before": "decided in memory; not appended",
    "journal.append.after": "handed to the Kafka client, which may have sent it; nobody is answered",
    "journal.confirm.before": "stored; nobody is answered",
    "journal.confirm.after": "answers and deliveries are made, perhaps not sent",
    "queue.create.before": "a client asks for a queue; nothing is decided",
    "queue.create.after": "the queue is in the open record; the record is not appended",
    "queue.delete.after": "the deletion is in the open record; the record is not appended",
    "transaction.commit.before": "a commit has come; nothing of it is decided",
    "transaction.commit.after": "all of it is in one record; the record is not appended",
    "branch.prepare.before": "a client asks to prepare its transaction; nothing of it is decided",
    "branch.prepare.after": "the branch is in the open record; the record is not appended",
    "branch.prepare.stored": "the branch is prepared; nobody is answered",
    "branch.end.before": "a manager tells a prepared branch its outcome; nothing of it is decided",
    "branch.end.after": "the outcome, and what it brings, are in one record; the record is not appended",
    "branch.end.stored": "the outcome is stored; nobody is answered",
    "ingress.take.before": "messages are read from the ingress; nothing is decided",
    "ingress.take.after": "they and the position behind them are in one record; the record is not appended",
    # -- broker: housekeeping
    "snapshot.taken": "a snapshot is made in memory; nothing is written",
    "store.write.after": "old messages are in the store; no snapshot names them",
    "snapshot.write.before": "what the snapshot needs is stored; the snapshot is not",
    "snapshot.write.after": "the snapshot is stored; it does not count, for it is not announced",
    "snapshot.announce.after": "the snapshot counts; the older ones are still there",
    "snapshot.delete.before": "an older snapshot is not needed any more; it is not deleted",
    "snapshot.delete.after": "it is deleted",
    "store.forget.before": "messages that are gone are in no snapshot; the store still has them",
    "store.forget.after": "they are out of the store",
    "journal.trim.before": "records are found to be needed by nobody; they are there",
    "journal.trim.after": "they are deleted; the ingress may not be trimmed yet",
    # -- pipelines' writer, in Spark's workers and in the driver
    "writer.init.before": "the next incarnation is made; the last one is not fenced",
    "writer.init.after": "the last one is fenced and its open transaction ended; the position is not read",
    "writer.position.read": "the position is the expected one; of the output at most a part is handed over",
    "writer.begin.after": "a transaction is begun; it is empty",
    "writer.produce.after": "the output is handed over; the position is not",
    "writer.commit.before": "output and position are in an open transaction",
    "writer.commit.after": "committed; the task does not know it",
    # -- pipelines
    "driver.topics.after": "Bascule's own topics are there; no position is taken",
    "driver.take.before": "the plan for the diverts is made; the positions are an earlier run's",
    "driver.take.after": "the positions are this run's; no query is started",
    "driver.source.after": "a source partition of an ingress is taken over; its query is not started",
    "join.before": "a divert that caught up and the others have stopped; their positions differ",
    "join.caught_up": "they stand at one offset, with a position each",
    "join.after": "they share a position; their query is not started",
    "driver.stop.before": "queries run; the driver is told to stop",
    "driver.stop.after": "queries are stopped; transactions may be open",
    "task.begin": "a batch has begun; its position is read and held",
    "task.transaction.after": "a transaction of a batch is committed; the next one has not begun",
    "task.divert.end": "all of a batch of the journal is committed; Spark does not know it",
    "task.ingress.end": "all of a batch of Kafka's topics is committed; Spark does not know it",
    "divert.dead_letter": "a message is found to be no Kafka record; its dead letter is not written",
    "ingress.dead_letter": "a Kafka record is found to be no message; its dead letter is not written",
    "sink.commit.before": "a user's batch is encoded; nothing is written",
    "sink.commit.after": "it is written with its number; Spark's checkpoint does not know it",
    # -- transactions over several resources
    "xa.enlist.after": "a branch is started; nothing is prepared",
    "xa.prepare.before": "work is done; this branch is not prepared",
    "xa.prepare.after": "this branch is prepared; nothing is decided",
    "xa.decide.before": "all branches are prepared; the decision is not stored",
    "xa.decide.after": "the decision is stored; no branch is told",
    "xa.finish.before": "the outcome stands; this branch is not told",
    "xa.finish.after": "this branch is told; others may not be",
    "xa.forget.before": "all branches are told; the decision is still in the log",
    "xa.one_phase.before": "the only branch with work is to commit; it is not told",
    "xa.one_phase.after": "it has committed; the application is not told",
    "xa.log.write.after": "lines are in the log's file; they are not synced",
    "xa.log.sync.after": "they are synced; nobody has acted on them",
    "xa.log.append.after": "a decision is in the topic of decisions; which one stands is not read",
    "xa.recover.before": "recovery has a plan; nothing of it is done",
    "xa.recover.decided": "recovery has stored that a transaction is rolled back; no branch is told",
    "xa.recover.step": "one step of recovery is done; others may not be",
    # -- Kafka resource adapter
    "inbound.take.before": "the group has given a source partition to this member; the inbound log has it as somebody else's",
    "inbound.take.owner": "a source partition is this member's in the inbound log; what was in flight is not read",
    "inbound.take.after": "what was in flight is known and read again; it is not delivered",
    "inbound.log.before": "records are read; the inbound log does not know them",
    "inbound.log.after": "they are in flight in the log; the group's offsets are not committed",
    "inbound.commit.after": "the offsets are committed; nothing is delivered",
    "inbound.deliver.before": "a record is with a worker; its endpoint is not called",
    "inbound.deliver.after": "the endpoint has returned; nothing is prepared or marked done",
    "inbound.claim.after": "a transaction's claim is in the log; whether it counts is not read",
    "inbound.done.before": "the record is handled, or its transaction decided; the log has it in flight",
    "inbound.done.after": "the record is in flight no more; the transaction's manager does not know it",
    "inbound.retry.before": "a delivery has failed and is rolled back; the record is not in the retry topic",
    "inbound.retry.after": "it is in the retry topic, and in flight no more where it was",
    "inbound.dead_letter.before": "the last try has failed; the record is not in the dead-letter topic",
    # -- Kafka transactions of a resource
    "slot.init.after": "the last transaction under an id is ended; the table is not read",
    "slot.commit.before": "messages and the end of their branch are in an open transaction",
    "slot.commit.after": "committed; the branch's manager does not know it",
}


def arm(text: str, once: str = "") -> None:
    """Arm points, in place of those armed before; "" for none. ``text`` is ``NAME:N[:stop][,...]``, N from 1. Raises ValueError."""
    _armed.clear()
    for each in filter(None, text.split(",")):
        name, _, rest = each.partition(":")
        pass_number, _, what = rest.partition(":")
        if name not in POINTS:
            raise ValueError(f"{ARMED_VARIABLE}: there is no crash point {name!r}")
        if what not in _SIGNALS:
            raise ValueError(f"{ARMED_VARIABLE}: a point kills, or says 'stop': {each!r}")
        if not (once and Path(once, name).exists()):
            _armed[name] = (int(pass_number or 1), itertools.count(1), once, _SIGNALS[what])


def point(name: str) -> None:
    """Ends this process at once when the point is armed and it is the pass for it. Safe for threads."""
    if _armed and name in _armed:
        _pass(name)


def _pass(name: str) -> None:
    wanted, passes, once, number = _armed[name]
    if next(passes) != wanted:
        return
    if once:
        try:
            Path(once, name).touch(exist_ok=False)
        except FileExistsError:  # it was another process's
            return
    os.write(2, f"crash point {name}, pass {wanted}\n".encode())
    os.kill(os.getpid(), number)


_SIGNALS = {"": signal.SIGKILL, "stop": signal.SIGSTOP}
_armed: dict[str, tuple[int, Iterator[int], str, signal.Signals]] = {}
arm(os.environ.get(ARMED_VARIABLE, ""), os.environ.get(ONCE_VARIABLE, ""))
