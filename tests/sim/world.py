"""Virtual time, a seeded scheduler, and processes that die and stop: the basis of a simulated run.

Every event happens at a time; a process is a set of coroutines that wait for promises and for time. One random generator decides all delays
and faults, so a seed repeats its run exactly.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

#: Every trouble of a run by name. It is noted when it takes effect, not when it is drawn.
TROUBLE: Final[Mapping[str, str]] = {
    # of requests to Kafka
    "lose request": "it never arrives, and is repeated",
    "lose answer": "it is carried out, and repeated all the same",
    "hold up request": "it arrives after its own repetition",
    "hold up EndTxn": "the end of a transaction does",
    "slow down": "a way in the network takes ten times as long",
    "time out": "a client gives a request up",
    "fail append": "an append is reported failed",
    "fail stored append": "one that is stored",
    "change leader": "a request comes while a leader is elected",
    "wait for replicas": "a record is acknowledged when all replicas in sync have it",
    "truncate log": "a new leader lacks records that no follower had",
    "unknown offset": "a repeated append is stored already, and the new leader does not say where",
    "too few in sync": "an append is refused, for too few replicas are in sync",
    "cut off node": "a node of Kafka is cut off from its peers, and not from its clients",
    "stop node": "a node of Kafka ends",
    "read from former leader": "a client with old metadata reads what a former leader has",
    "write to former leader": "a client with old metadata appends to a former leader, which can never acknowledge it",
    "move coordinator": "another node replays the log of the coordinator",
    "delete old input": "retention deletes records of an application that the ingress has read",
    "compact": "the log cleaner takes positions, snapshots, definitions and stored messages away that are not the newest of their key",
    "fence": "a producer is refused, for a newer one has its name",
    "expire transaction": "the coordinator ends one that is open for too long",
    "abort input": "a Kafka application rolls back what an ingress reads",
    # of brokers and their clients
    "refuse message": "a broker does not take a message of a transaction",
    "kill broker": "one that serves",
    "kill housekeeper": "one that serves, at a step of its housekeeping",
    "stop broker": "it stands still for a while",
    "take over": "a broker begins an epoch though the other one serves",
    "overtake": "one that has begun an epoch and still loads is replaced",
    "lose election": "one that serves is told of it",
    "step down": "one that serves finds a newer epoch among its records",
    "epoch ended": "one begins anew after an append that failed, or that it could not load",
    "restart standby": "while another one serves",
    "read slowly": "a broker that loads its state takes its time",
    "elect standby": "one that has followed the journal begins an epoch",
    "trim journal": "what nobody needs of it is deleted",
    "trim ingress": "what of it is in the journal is deleted",
    "store messages": "old ones, for which much of the journal would have to be kept",
    "forget stored messages": "those that are gone",
    "housekeeping round failed": "housekeeping does not get an answer, or its announcement is not stored in time",
    "outdated snapshot": "it needs what was deleted since it was read",
    "snapshot skipped": "it was not announced",
    "load restarted": "what a broker was to read was trimmed meanwhile, or topics contradict one another",
    "load behind barriers": "a broker reads its state so that no former leader can answer",
    "journal stalled": "appends are out for too long",
    "cut clients": "connections break",
    "doubt": "a client does not know what became of its operation",
    # of processes and their clocks
    "suspend machine": "a process stands still, and its monotonic clock with it",
    "jump clock": "a machine's wall clock jumps",
    # of diverts that are defined at run time
    "define divert": "an administrator creates a divert while the others run",
    "change divert": "an administrator changes the settings of a divert",
    "delete divert": "an administrator deletes a divert",
    "definition in doubt": "Kafka did not say that it has stored a definition",
    "divert covered": "a broker says from which offset on the journal has the messages for a divert",
    "begin divert": "a driver registers the position of a divert",
    "forget divert": "a driver deletes the position of a divert",
    # of transactions with branches
    "kill manager": "one with transactions under way, perhaps",
    "stop manager": "it stands still for a while",
    "lose verdict": "of the log or the database, whose call has taken effect",
    "lose log": "a call comes while the decision log is away",
    "lose database": "a call comes while the database is away",
    "ask standby": "the list of prepared branches is that of some time before",
    "end by hand": "the operator of a database ends a prepared branch",
    "hold up manager": "what it says arrives late, perhaps when its connection is gone",
    "repeat request": "a client asks again on another connection",
    "join session": "a second session of a connection works in a branch",
    "close session": "one that has joined a branch closes before the branch is prepared or committed",
    "recover branch": "one that another process has prepared, or that could not be told",
    "force branch": "an administrator ends it",
    # of branches in Kafka
    "trim branches": "messages on the side topic that no prepared branch needs are deleted",
    "send beside": "a task sends a message of a transaction that another task is about to commit",
    "refuse beside": "such a message comes too late, and its sender is told so",
    "end open transaction": "somebody died in the middle of one, and the log cannot be read behind it",
    # of transactions on one host
    "hold up statement": "it arrives when its client has given up, perhaps",
    "remove log": "the file of the decision log is moved away for a while",
    "write late": "an application works on the handle of a transaction that has ended",
    # of the adapter's members
    "kill member": "one with partitions, perhaps",
    "stop member": "it stands still for a while",
    "fail endpoint": "it does not like a record",
    "retry record": "it has failed, and is tried again",
    "dead-letter record": "it has failed too often",
    "set group back": "a commit of offsets that was held up arrives after later ones",
    "rebalance": "the group gives partitions to other members",
    "finish claim": "a new owner ends the transaction of an earlier one",
    "recover claim": "recovery rolls back a transaction that has claimed a record and is not decided",
    "read log anew": "a member begins to read the inbound log from its beginning",
    # of Spark
    "kill driver": "the newest one",
    "stop driver": "it and its workers stand still for a while",
    "kill worker": "one with a task, perhaps",
    "lose task": "a worker died with it, and it is tried again",
    "stop worker": "it stands still for a while",
    "rerun batch": "a batch begins before what is done already",
    "zombie task": "one that still runs is taken for dead, and tried again elsewhere",
    "lose checkpoint": "a query begins anew and knows of no batch before",
    "fail query": "its tasks failed too often, or its position cannot be had",
    "PositionMoved": "a writer finds that another one has written",
    "PositionTaken": "a driver finds that another one is in charge",
}


#: When a run begins, so that no wall clock jumps to before 1970.
START_MS: Final = 4_000_000.0
#: Two sums of the same times differ by less than this.
ROUNDING_MS: Final = 1e-6


class TimeOut(Exception):
    """Raised when a promise was not kept in time."""


class Promise(Generic[T]):
    """A later value, or an error instead. Only the first of them counts."""

    __slots__ = ("_then", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: T
        self.error: Exception | None = None
        self._then: list[Callable[[], None]] | None = None

    def keep(self, value: T) -> None:
        """Set the value."""
        if not self.done:
            self.value = value
            self.done = True
            if self._then is not None:
                self._call()

    def fail(self, error: Exception) -> None:
        """Set the error."""
        if not self.done:
            self.error = error
            self.done = True
            if self._then is not None:
                self._call()

    def _call(self) -> None:
        then, self._then = self._then, None
        for action in then or ():
            action()

    def then(self, action: Callable[[], None]) -> None:
        """Call an action when the promise is done; at once if it is."""
        if self.done:
            action()
        elif self._then is None:
            self._then = [action]
        else:
            self._then.append(action)

    def result(self) -> T:
        """Return the value of a promise that is done, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.value

    def __await__(self) -> Generator[Promise[T], None, T]:
        if not self.done:
            yield self
        return self.result()


class World:
    """The clock, the future events, and chance.

    ``violations`` are the rules that this run breaks on purpose; each driver passes them to its protocols.
    """

    def __init__(self, seed: int, violations: Collection[enum.StrEnum] = ()) -> None:
        self.random = random.Random(seed)
        self.violations = frozenset(violations)
        self.now_ms = START_MS
        self.stopped = False
        self.offsets_ms: dict[str, float] = {}  # deviations of machines' wall clocks that have jumped
        self.trace: list[str] | None = None
        self.seen: Counter[str] = Counter()  # troubles by name
        self._events: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, delay_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something later."""
        self._number += 1
        heappush(self._events, (self.now_ms + delay_ms, self._number, None, action, arguments))

    def later(self, delay_ms: float, process: Process | None, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Do something later; if it is for a process, as ``Process.do`` says."""
        self._number += 1
        heappush(self._events, (self.now_ms + delay_ms, self._number, process, action, arguments))

    def run(self, until_ms: float) -> None:
        """Let time pass, up to a moment or until the run is stopped."""
        events, pop = self._events, heappop
        self.stopped = False
        while events and events[0][0] <= until_ms and not self.stopped:
            self.now_ms, _, process, action, arguments = pop(events)
            if process is None or (process.alive and not process.stopped):
                action(*arguments)
            else:
                process.do(action, *arguments)
        if not self.stopped:
            self.now_ms = until_ms

    def stop(self) -> None:
        """End the run with this event."""
        self.stopped = True

    def say(self, text: str) -> None:
        """Note an event for people who read the run."""
        if self.trace is not None:
            self.trace.append(f"{self.now_ms:10.2f} {text}")

    def note(self, trouble: str, who: str = "") -> None:
        """Note that a trouble has taken effect."""
        assert trouble in TROUBLE
        self.seen[trouble] += 1
        self.say(f"{who or 'world'}: {trouble}")

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return probability > 0 and self.random.random() < probability


class Process:
    """Coroutines that die and stop together. A stopped process (SIGSTOP) does nothing until it continues; events for it wait meanwhile.

    A process has the wall clock of its machine, which may jump, and a monotonic clock, which continues while the process is stopped, but
    not while its machine is suspended.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.machine = name.split("#")[0].split(".")[0]
        self.alive = True
        self.stopped = False
        self._suspended_ms: float | None = None  # since when its monotonic clock stands still
        self._lost_ms = 0.0  # how long the clock stood still before
        self._asleep: list[tuple[Promise[None], float]] = []  # timers that ran out by the world's clock, with their monotonic times
        self._late: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._running: dict[Coroutine[Any, Any, Any], None] = {}

    @property
    def wall_ms(self) -> float:
        """Return the time of day of this process's machine."""
        return self.world.now_ms + self.world.offsets_ms.get(self.machine, 0.0)

    @property
    def monotonic_ms(self) -> float:
        """Return the monotonic time, which stops only while the machine is suspended."""
        now_ms = self.world.now_ms if self._suspended_ms is None else self._suspended_ms
        return now_ms - self._lost_ms

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Promise[T]:
        """Run a coroutine in this process."""
        result: Promise[T] = Promise()
        self._running[coroutine] = None
        self.world.later(0, self, self._step, (coroutine, result))
        return result

    def _step(self, coroutine: Coroutine[Any, Any, T], result: Promise[T]) -> None:
        if coroutine not in self._running:
            return
        try:
            waits_for: Promise[Any] = coroutine.send(None)
        except StopIteration as end:
            self._running.pop(coroutine, None)
            result.keep(end.value)
        except Exception as error:
            self._running.pop(coroutine, None)
            result.fail(error)
        else:
            waits_for.then(partial(self.world.later, 0, self, self._step, (coroutine, result)))

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Let something happen to this process: now, when it continues, or never."""
        if self.stopped:
            self._late.append((action, arguments))
        elif self.alive:
            action(*arguments)

    def after(self, delay_ms: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something later if the process lives."""
        self.world.later(delay_ms, self, action, arguments)

    def sleep(self, delay_ms: float) -> Promise[None]:
        """Return a promise that is kept after a delay."""
        slept: Promise[None] = Promise()
        self.world.later(delay_ms, None, self._wake, (slept, self.monotonic_ms + delay_ms))
        return slept

    def _wake(self, slept: Promise[None], due_ms: float) -> None:
        if self._suspended_ms is not None:
            self._asleep.append((slept, due_ms))
        elif self._lost_ms and self.monotonic_ms < due_ms - ROUNDING_MS:
            self.world.after(due_ms - self.monotonic_ms, self._wake, slept, due_ms)
        else:
            slept.keep(None)

    async def within(self, limit_ms: float, promise: Promise[T]) -> T:
        """Return the value of a promise. Raises TimeOut if it takes too long."""
        either: Promise[T] = Promise()
        promise.then(lambda: either.fail(promise.error) if promise.error is not None else either.keep(promise.value))
        self.sleep(limit_ms).then(lambda: None if either.done else either.fail(TimeOut(f"{limit_ms:.0f} ms")))
        return await either

    def kill(self) -> None:
        """Kill the process (kill -9)."""
        self.alive = self.stopped = False
        self._late.clear()
        running, self._running = list(self._running), {}
        for coroutine in running:
            coroutine.close()

    def stop(self) -> None:
        """Stop the process (SIGSTOP)."""
        self.stopped = True

    def suspend(self) -> None:
        """Suspend the machine: as SIGSTOP, and the monotonic clock stops, too."""
        self.stopped = True
        if self._suspended_ms is None:
            self._suspended_ms = self.world.now_ms

    def go_on(self) -> None:
        """Continue the process (SIGCONT), or resume the machine."""
        self.stopped = False
        if self._suspended_ms is not None:
            self._lost_ms += self.world.now_ms - self._suspended_ms
            self._suspended_ms = None
            asleep, self._asleep = self._asleep, []
            for slept, due_ms in asleep:
                self._wake(slept, due_ms)
        late, self._late = self._late, []
        for action, arguments in late:
            self.do(action, *arguments)


async def gather(promises: list[Promise[T]]) -> list[T]:
    """Return the values of all promises. Raises the error of the first one that failed."""
    return [await promise for promise in promises]
