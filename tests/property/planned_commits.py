"""Random commands for the engine between the pieces of planned commits, prepares and ends of branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from bascule.broker import branches
from bascule.broker.commit_plan import CommitPlan
from bascule.broker.transactions import LocalTransaction
from bascule.broker.turns import Turns
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from tests.property.broker_commands import BranchRun, Run


class PlannedRun(BranchRun):
    """A run in which commits, prepares and ends of branches are planned in pieces, and other commands come between them.

    All other work is done at once. If the test lets plans begin in ``plan_turns``, they continue only there.
    """

    LONGEST = 200
    plan_turns: ClassVar[Turns]

    def __init__(self, seed: int) -> None:
        self.planned: dict[LocalTransaction, tuple[bool, list[tuple[str, Any]]]] = {}  # whether it will be a branch, and what it holds
        self.plans: dict[Xid, CommitPlan] = {}
        PlannedRun.plan_turns = Turns(1, when_stored=lambda *_: None)
        super().__init__(seed)

    def plan(self) -> None:
        """Commit or prepare as a client, which adds nothing to its transaction until this is done."""
        chosen = [transaction for transaction, actions in self.transactions.items() if actions and transaction not in self.refused]
        if chosen:
            transaction = max(chosen, key=lambda transaction: len(self.transactions[transaction]))
            branch = self.random.random() < 0.4
            self.history.append(f"plan {'prepare' if branch else 'commit'} of {transaction.id!r}")
            self.planned[transaction] = (branch, self.transactions.pop(transaction))
            self.go_on_with(transaction)

    def plan_end(self) -> None:
        """Request the commit of a branch."""
        chosen = [xid for xid in self.held if xid not in self.plans]
        if chosen:
            xid = self.random.choice(chosen)
            self.history.append(f"plan commit of {xid}")
            plan = branches.plan_end(self.broker.engine, xid, Ending.COMMITTED)
            if plan is not None:
                self.plans[xid] = plan

    def delete_queue(self) -> None:
        """Delete a queue from which nothing expires: it is not specified whether an expiry precedes the deletion."""
        lines = [line for line in self.live() if line.name in self.queues and not any(copy.facts.expiry_ms for copy in line.copies)]
        if lines:
            self.delete(self.random.choice(lines))

    def go_on_planning(self) -> None:
        """Do some pieces of each plan."""
        self.plan_turns.steps = self.plan_turns.left = self.random.choice((5, 20, 50))
        self.plan_turns.go_on()
        self.history.append("plans go on")

    def go_on_with(self, transaction: LocalTransaction) -> bool:
        """Ask whether a plan is complete, as the connection of a client does in each turn."""
        engine, branch = self.broker.engine, self.planned[transaction][0]
        return engine.plan_prepare(transaction) if branch else engine.plan_commit(transaction)

    def carry_out_planned(self) -> None:
        """Complete planned work, or drop it with its client."""
        for transaction in list(self.planned):
            if self.random.random() < 0.1:
                self.history.append(f"roll back {transaction.id!r}, which is planned")
                self.broker.engine.rollback(transaction)
                self.roll_back(self.planned.pop(transaction)[1])
            elif self.go_on_with(transaction):
                branch, actions = self.planned.pop(transaction)
                self.history.append(f"end of the plan of {transaction.id!r}")
                if branch:
                    self.prepare_one(transaction, actions)
                else:
                    self.commit(transaction, actions)
        for xid in [xid for xid, plan in self.plans.items() if plan.over]:
            self.tell(xid, Ending.COMMITTED)
            self.plans.pop(xid).close()

    def end_of_branch(self, xid: Xid, ending: Ending, done: Callable[[], None]) -> None:
        """End a transaction as any run does, by its plan if there is one."""
        branches.end(self.broker.engine, xid, ending, done, plan=self.plans.get(xid))

    def crash(self) -> None:
        """Crash as any run does; plans are lost."""
        super().crash()
        self.planned.clear()
        self.plans.clear()

    def drain(self) -> None:
        """Detach as any run does; planned work is dropped."""
        for transaction, (_, actions) in self.planned.items():
            self.transactions[transaction] = actions
        for plan in self.plans.values():
            plan.close()
        self.plans.clear()
        super().drain()
        assert self.broker.engine.memory.plans_bytes == 0, "plans of commits that are over"

    COMMANDS = (
        (Run.send, 24), (Run.repeat, 1), (Run.attach, 2), (Run.detach, 1), (delete_queue, 1), (Run.credit, 2), (Run.settle_one, 30),
        (Run.begin, 2), (Run.end, 1), (Run.end_branch, 1), (plan, 3), (plan_end, 3), (go_on_planning, 8), (carry_out_planned, 5),
        (Run.turn, 4), (Run.confirm, 6), (Run.pass_time, 1), (Run.snapshot, 1), (crash, 1), (Run.settle, 10),
    )  # fmt: skip
