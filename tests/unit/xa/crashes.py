"""Run a transaction over model resources, crash the process or a resource at one point, recover, and check the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from bascule.core.errors import Unavailable
from bascule.testing.xa import Checked, DurableBranches, ModelLog, ModelResource, Watch, unwatched
from bascule.xa.errors import ResourceFailed, TransactionError, TransactionInDoubt, TransactionRolledBack
from bascule.xa.log import LogState, Outcome
from bascule.xa.recovery import Recoverer
from bascule.xa.recovery_protocol import Pass
from bascule.xa.transaction import Transaction, TransactionEnvironment
from tests.support.speed import SLOWNESS

MANAGER = "shop"
VOTES = ("yes", "read-only", "no")
ENDINGS = ("commit", "rollback")
TIMEOUT_S = 60.0 * SLOWNESS


class Crash(BaseException):
    """The running process ends here. Nothing catches the crash, and later calls of the process have no effect."""


@dataclass
class World:
    """The durable state that survives every process."""

    votes: Sequence[str]
    branches: list[DurableBranches] = field(default_factory=list)
    log: LogState = field(default_factory=LogState)

    def __post_init__(self) -> None:
        self.branches = [DurableBranches() for _ in self.votes]

    def resources(self, watch: Watch = unwatched) -> list[ModelResource]:
        return [
            ModelResource(f"r{number}", durable, vote=vote, watch=watch)
            for number, (vote, durable) in enumerate(zip(self.votes, self.branches, strict=True), 1)
        ]

    def recover(self, watch: Watch = unwatched) -> Pass:
        """Run one recovery pass in a new process."""
        return Recoverer(MANAGER, ModelLog(self.log, watch=watch), self.resources(watch), by="recoverer", patient=False).run()


@dataclass
class Fault:
    """The victim fails at the point with number ``at``. If ``stays``, it is down until the end of the run, otherwise for one call."""

    victim: str
    at: int
    stays: bool = True
    seen: list[str] = field(default_factory=list)
    down: bool = False

    def __call__(self, point: str) -> None:
        number = len(self.seen)
        self.seen.append(point)
        who = point.partition(".")[0]
        hit = number == self.at and self.victim in ("process", who)
        self.down = (self.down and self.stays) or hit
        if self.down and self.victim == "process":
            raise Crash
        if self.down and self.victim == who:
            raise Unavailable("the log is down") if who == "log" else ResourceFailed(f"{who} is down")


def run(world: World, ending: str, watch: Watch = unwatched, log: type[ModelLog] = ModelLog) -> str:
    """Run one transaction over all resources, and return the outcome that the application gets."""
    environment = TransactionEnvironment(
        MANAGER, log(world.log, watch=watch), "application", lambda _: True, lambda _: lambda: None, lambda *_: None
    )
    transaction = Transaction(environment, TIMEOUT_S)
    try:
        for resource in world.resources(watch):
            transaction.enlist(Checked(resource)).append(f"work of {resource.name}")
        if ending == "rollback":
            transaction.rollback()
            return "rolled back"
        transaction.commit()
    except Crash:
        return "nothing"
    except TransactionRolledBack:
        return "rolled back"
    except TransactionInDoubt:
        return "in doubt"
    except TransactionError as error:
        return type(error).__name__
    except ResourceFailed:  # raised by enlist; a `with` block would roll back
        try:
            transaction.rollback()
        except Crash:
            return "nothing"
        return "rolled back"
    return "committed"


def verdict(world: World, reported: str) -> list[str]:
    """Return the anomalies of a recovered world. Each one begins with its name."""
    wrong = []
    committed = [len(each.committed) for each in world.branches]
    voted_yes = [count for count, vote in zip(committed, world.votes, strict=True) if vote == "yes"]
    others = [count for count, vote in zip(committed, world.votes, strict=True) if vote != "yes"]
    if len(set(voted_yes)) > 1 or max(committed) > 1:
        wrong.append(f"xa-split: {committed}")
    # The manager may send a one-phase commit to a resource that has nothing to commit.
    if any(others) and any(count for count, vote in zip(committed, world.votes, strict=True) if vote == "no"):
        wrong.append("xa-split: a branch that voted no is committed")
    if reported == "committed" and 0 in voted_yes:
        wrong.append("xa-lost: commit reported, but a branch is not committed")
    if reported == "rolled back" and any(voted_yes):
        wrong.append("xa-ghost: rollback reported, but a branch is committed")
    if reported not in ("committed", "rolled back", "in doubt", "nothing"):
        wrong.append(f"xa-heuristic: {reported}, unforced")
    if any(each.prepared for each in world.branches):
        wrong.append("xa-stuck: a branch is still prepared")
    if world.log.heuristics or any(each.heuristic for each in world.branches):
        wrong.append("xa-heuristic: recorded, unforced")
    if any(each.outcome is Outcome.COMMIT for each in world.log.decisions.values()):
        wrong.append("xa-orphan: a decision stays in the log")
    return wrong


def points(votes: Sequence[str], ending: str) -> list[str]:
    """Return the points that a transaction without a crash passes."""
    nothing = Fault("nobody", -1)
    run(World(votes), ending, nothing)
    return nothing.seen


@dataclass(frozen=True)
class Case:
    """A crash: the victim, the point, and whether the victim stays down."""

    votes: tuple[str, ...]
    ending: str
    victim: str
    at: int
    point: str
    stays: bool

    def play(self) -> tuple[World, str]:
        """Run the transaction with the crash; return the world and the outcome that the application gets."""
        world = World(self.votes)
        reported = run(world, self.ending, Fault(self.victim, self.at, self.stays))
        return world, reported


def cases(count: int) -> Iterator[Case]:
    """Yield every case with ``count`` resources."""
    for votes in product(VOTES, repeat=count):
        for ending in ENDINGS:
            for at, point in enumerate(points(votes, ending)):
                who = point.partition(".")[0]
                yield Case(votes, ending, "process", at, point, True)
                for stays in (True, False):
                    yield Case(votes, ending, who, at, point, stays)


def crashed_at_each_point(act: Callable[[Watch], object]) -> Iterator[int]:
    """Run ``act`` repeatedly, with a crash at its first point, then at its second, ... until it ends without a crash."""
    at = 0
    while True:
        fault = Fault("process", at)
        try:
            act(fault)
        except Crash:
            yield at
            at += 1
        else:
            if not fault.down:
                return
            yield at
            at += 1
