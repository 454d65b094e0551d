"""Crash points: every boundary between two effects has a name, and a test can end the process there as a power failure would.

    BASCULE_CRASH=journal.append.after:3 bascule broker     # SIGKILL at the third pass
    BASCULE_CRASH=journal.trim.before:1:stop bascule broker # SIGSTOP: the process is suspended until it gets SIGCONT

Separate several points by commas. Each process that inherits the variable counts its own passes. With ``BASCULE_CRASH_ONCE=DIR`` each point
ends only one process and leaves a file with its name in DIR; a restarted process is not ended again. If no point is armed, a point is a
call of an empty function. Points are in code that runs for records, batches and transactions, never for single messages.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

ARMED_VARIABLE = "BASCULE_CRASH"
ONCE_VARIABLE = "BASCULE_CRASH_ONCE"

#: Name -> which effects have happened at the point, and which have not.
POINTS: dict[str, str] = {
    # -- broker: an epoch's start and end
    "election.won": "Kafka has elected this broker; the broker has not begun",
    "election.confirmed": "Kafka has confirmed the election; no epoch is started",
    "epoch.start.before": "the broker follows the state; the start record is not appended",
    "epoch.start.after": "the start record is stored, older epochs are fenced; the state is incomplete",
    "epoch.loaded": "the state is complete; no client is served",
    "handover.before": "a stopping broker has disconnected its clients; its last snapshot is not taken",
    "handover.snapshot": "the last snapshot is stored; the broker has not left the election",
    "handover.resigned": "the broker has left the election; its process has not ended",
    # -- broker: records
    "journal.append.before": "a record is decided in memory; it is not appended",
    "journal.append.after": "the Kafka client has the record and may have sent it; no client is answered",
    "journal.confirm.before": "the record is stored; no client is answered",
    "journal.confirm.after": "answers and deliveries are written; they may not be sent",
    "queue.create.before": "a client requests a queue; nothing is decided",
    "queue.create.after": "the queue is in the open record; the record is not appended",
    "queue.delete.after": "the deletion is in the open record; the record is not appended",
    "transaction.commit.before": "a commit has arrived; nothing of the commit is decided",
    "transaction.commit.after": "the whole commit is in one record; the record is not appended",
    "branch.prepare.before": "a client requests to prepare its transaction; nothing is decided",
    "branch.prepare.after": "the branch is in the open record; the record is not appended",
    "branch.prepare.stored": "the branch is prepared; no client is answered",
    "branch.end.before": "a manager commits or rolls back a prepared branch; nothing is decided",
    "branch.end.after": "the outcome and its effects are in one record; the record is not appended",
    "branch.end.stored": "the outcome is stored; no client is answered",
    "ingress.take.before": "messages are read from the ingress; nothing is decided",
    "ingress.take.after": "the messages and the next position are in one record; the record is not appended",
    # -- broker: housekeeping
    "snapshot.taken": "a snapshot exists in memory; nothing is written",
    "store.write.after": "old messages are in the store; no snapshot refers to them",
    "snapshot.write.before": "the data of the snapshot is stored; the snapshot is not",
    "snapshot.write.after": "the snapshot is stored; it is not announced and so not valid",
    "snapshot.announce.after": "the snapshot is valid; the older ones are not deleted",
    "snapshot.delete.before": "an older snapshot is not needed; it is not deleted",
    "snapshot.delete.after": "the older snapshot is deleted",
    "store.forget.before": "removed messages are in no snapshot; the store still has them",
    "store.forget.after": "the removed messages are deleted from the store",
    "journal.trim.before": "records are not needed; they are not deleted",
    "journal.trim.after": "the records are deleted; the ingress may not be trimmed",
    "coverage.before": "the broker journals the messages for a new divert; nothing proves that no successor has missed the divert",
    "coverage.proved": "a record of this epoch is stored behind the definition of a divert; nobody is told",
    "coverage.after": "the mark is stored from which a divert is covered; the broker does not remember it",
    # -- pipelines' writer, in Spark's workers and in the driver
    "writer.init.before": "the next incarnation exists; the last one is not fenced",
    "writer.init.after": "the last incarnation is fenced and its open transaction ended; the position is not read",
    "writer.position.read": "the position is as expected; the producer has at most a part of the output",
    "writer.begin.after": "a transaction has begun; it is empty",
    "writer.produce.after": "the producer has the output, but not the position",
    "writer.commit.before": "output and position are in an open transaction",
    "writer.commit.after": "the transaction is committed; the task does not know it",
    # -- pipelines
    "driver.topics.after": "Bascule's own topics exist; no position is taken over",
    "driver.take.before": "the plan for the diverts exists; the positions belong to an earlier run",
    "driver.take.after": "the positions belong to this run; no query is started",
    "driver.source.after": "a source partition of an ingress is taken over; its query is not started",
    "join.before": "a divert that caught up and the others have stopped; their positions differ",
    "join.caught_up": "the divert and the others are at one offset, with a position each",
    "join.after": "the diverts share a position; their query is not started",
    "hold.before": "the task of a group has stopped; a paused divert is still a member",
    "hold.after": "the paused divert has a position of its own; the task of its group is not started",
    "offsets.before": "the positions of a stopped pipeline belong to nobody's task; an administrator's request has not moved them",
    "offsets.after": "the request has moved the positions; the driver does not know it",
    "define.before": "a divert that was defined at run time has no position; nothing is written",
    "define.after": "the divert has a position and the id of its definition; its query is not started",
    "forget.before": "a deleted pipeline has stopped, and its consumer group is deleted; its positions are stored",
    "forget.after": "the positions of a deleted pipeline are deleted; the driver does not know it",
    "redrive.taken": "the position of redrives belongs to this attempt; the marks are not read",
    "redrive.before": "dead letters are read and converted; no record, no mark and no report is written",
    "redrive.after": "records, marks and report are committed; the driver does not know it",
    "driver.stop.before": "queries run; the driver is asked to stop",
    "driver.stop.after": "queries are stopped; transactions may be open",
    "task.begin": "a task has begun; its position is read and held",
    "task.transaction.after": "a transaction of a task is committed; the next one has not begun",
    "task.divert.end": "all records of the journal that were there are committed; Spark does not know it",
    "task.ingress.end": "all records of Kafka's topics that were there are committed; Spark does not know it",
    "divert.dead_letter": "a message cannot become a Kafka record; its dead letter is not written",
    "ingress.dead_letter": "a Kafka record cannot become a message; its dead letter is not written",
    "sink.commit.before": "a user's batch is encoded; nothing is written",
    "sink.commit.after": "the batch is written with its number; Spark's checkpoint does not have it",
    # -- transactions over several resources
    "xa.enlist.after": "a branch is started; nothing is prepared",
    "xa.prepare.before": "work is done; this branch is not prepared",
    "xa.prepare.after": "this branch is prepared; nothing is decided",
    "xa.decide.before": "all branches are prepared; the decision is not stored",
    "xa.decide.after": "the decision is stored; no branch is informed",
    "xa.finish.before": "the outcome is final; this branch is not informed",
    "xa.finish.after": "this branch is informed; others may not be",
    "xa.forget.before": "all branches are informed; the decision is still in the log",
    "xa.one_phase.before": "the only branch with work is to commit; it is not informed",
    "xa.one_phase.after": "the only branch with work is committed; the application is not informed",
    "xa.log.write.after": "lines are in the log's file; they are not synced",
    "xa.log.sync.after": "the lines are synced; nothing has been done because of them",
    "xa.log.append.after": "a decision is in the topic of decisions; the valid decision is not read",
    "xa.recover.before": "recovery has a plan; nothing is done",
    "xa.recover.decided": "recovery has stored that a transaction is rolled back; no branch is informed",
    "xa.recover.step": "one step of recovery is done; others may not be",
    # -- Kafka resource adapter
    "inbound.take.before": "the group has given a source partition to this member; in the inbound log another member owns it",
    "inbound.take.owner": "this member owns a source partition in the inbound log; the records in flight are not read",
    "inbound.take.after": "the records in flight are read again; they are not delivered",
    "inbound.log.before": "records are read; the inbound log does not have them",
    "inbound.log.after": "the records are in flight in the log; the group's offsets are not committed",
    "inbound.commit.after": "the offsets are committed; nothing is delivered",
    "inbound.deliver.before": "a worker has a record; its endpoint is not called",
    "inbound.deliver.after": "the endpoint has returned; nothing is prepared or marked done",
    "inbound.claim.after": "a transaction's claim is in the log; its validity is not read",
    "inbound.done.before": "the record is handled, or its transaction decided; the log has it in flight",
    "inbound.done.after": "the record is no longer in flight; the transaction's manager does not know it",
    "inbound.retry.before": "a delivery has failed and is rolled back; the record is not in the retry topic",
    "inbound.retry.after": "the record is in the retry topic and no longer in flight in its own",
    "inbound.dead_letter.before": "the last try has failed; the record is not in the dead-letter topic",
    # -- Kafka transactions of a resource
    "slot.init.after": "the last transaction with an id is ended; the table is not read",
    "slot.commit.before": "messages and the end of their branch are in an open transaction",
    "slot.commit.after": "the Kafka transaction is committed; the branch's manager does not know it",
}


def arm(text: str, once: str = "") -> None:
    """Arm points and disarm all others; "" arms none. ``text`` is ``NAME:N[:stop][,...]``, N from 1. Raises ValueError."""
    _armed.clear()
    for each in filter(None, text.split(",")):
        name, _, rest = each.partition(":")
        pass_number, _, what = rest.partition(":")
        if name not in POINTS:
            raise ValueError(f"{ARMED_VARIABLE}: unknown crash point {name!r}")
        if what not in _SIGNALS:
            raise ValueError(f"{ARMED_VARIABLE}: invalid action in {each!r}; only 'stop' is allowed")
        if not (once and Path(once, name).exists()):
            _armed[name] = (int(pass_number or 1), itertools.count(1), once, _SIGNALS[what])


def point(name: str, bring_about: Callable[[], object] | None = None) -> None:
    """End this process if the point is armed and this is its pass. Thread-safe.

    ``bring_about`` makes the state of the description certain where the product does not wait for it. Only an armed point calls it.
    """
    if _armed and name in _armed:
        if bring_about is not None:
            bring_about()
        _pass(name)


def _pass(name: str) -> None:
    wanted, passes, once, number = _armed[name]
    if next(passes) != wanted:
        return
    if once:
        try:
            Path(once, name).touch(exist_ok=False)
        except FileExistsError:  # another process has used the point
            return
    os.write(2, f"crash point {name}, pass {wanted}\n".encode())
    os.kill(os.getpid(), number)


_SIGNALS = {"": signal.SIGKILL, "stop": signal.SIGSTOP}
_armed: dict[str, tuple[int, Iterator[int], str, signal.Signals]] = {}
arm(os.environ.get(ARMED_VARIABLE, ""), os.environ.get(ONCE_VARIABLE, ""))
