"""Which failed attempts of a transactional function are repeated: those that were rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from bascule.core.errors import BasculeError, Unavailable
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import Propagation, TransactionInDoubt, TransactionManager, retries
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.errors import Code, HeuristicOutcome

#: How a function is made transactional: with the blocking manager as a function or coroutine, or with the asynchronous one.
KINDS = ("function", "coroutine", "asyncio")


class RetriedShop:
    """A manager with two resources. ``at`` has actions at points of calls, each for the first call."""

    def __init__(self) -> None:
        self.at: dict[str, Callable[[], object]] = {}
        self.log = ModelLog(watch=self._watch)
        self.one, self.two = ModelResource("one", watch=self._watch), ModelResource("two", watch=self._watch)
        self.manager = TransactionManager("shop", self.log, [self.one, self.two])
        self.calls = 0

    def _watch(self, point: str) -> None:
        self.at.pop(point, lambda: None)()

    def finish_one_by_hand(self, code: Code) -> None:
        self.one.force(next(iter(self.one.durable.prepared)), code)

    def pay(self) -> None:
        self.calls += 1
        for resource in (self.one, self.two):
            self.manager.enlist(resource).append("work")

    def run(self, kind: str, work: Callable[[], object], **how: Any) -> None:
        """Call ``work`` as a transactional function."""

        async def coroutine() -> None:
            work()

        if kind == "function":
            self.manager.transactional(**how)(work)()
            return
        manager: Any = self.manager if kind == "coroutine" else AsyncTransactionManager(self.manager)
        call: Callable[[], Awaitable[None]] = manager.transactional(**how)(coroutine)

        async def main() -> None:
            await call()

        asyncio.run(main())


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[RetriedShop]:
    monkeypatch.setattr(retries, "RETRY_PAUSE_S", 0.0)
    shop = RetriedShop()
    with shop.manager:
        yield shop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retried", [Exception, BasculeError])
def test_transaction_in_doubt_is_not_repeated_although_its_base_class_is_retried(
    shop: RetriedShop, kind: str, retried: type[Exception]
) -> None:
    shop.at["log.decide.after"] = raising(Unavailable("no answer"))
    with pytest.raises(TransactionInDoubt):
        shop.run(kind, shop.pay, attempts=3, retry_on=(retried,))
    assert shop.calls == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_heuristic_outcome_is_not_repeated_although_its_base_class_is_retried(shop: RetriedShop, kind: str, commits: bool) -> None:
    if commits:
        shop.at["two.prepare.after"] = lambda: shop.finish_one_by_hand(Code.XA_HEURRB)
    else:
        shop.at["one.prepare.after"] = lambda: shop.finish_one_by_hand(Code.XA_HEURCOM)
        shop.two.vote = "no"
    with pytest.raises(HeuristicOutcome):
        shop.run(kind, shop.pay, attempts=3, retry_on=(Exception,))
    assert (shop.calls, shop.one.durable.committed) == (1, [] if commits else ["work"])


@pytest.mark.parametrize("kind", KINDS)
def test_doubt_of_inner_transaction_is_not_repeated_by_outer_function(shop: RetriedShop, kind: str) -> None:
    inner = shop.manager.transactional(propagation=Propagation.REQUIRES_NEW)(shop.pay)
    shop.at["log.decide.after"] = raising(Unavailable("no answer"))
    with pytest.raises(TransactionInDoubt):
        shop.run(kind, inner, attempts=3, retry_on=(Exception,))
    assert shop.calls == 1


@pytest.mark.parametrize("kind", KINDS)
def test_function_that_fails_after_its_own_commit_is_not_repeated(shop: RetriedShop, kind: str) -> None:
    def pay() -> None:
        shop.pay()
        shop.manager.current.commit()
        raise LookupError("after the commit")

    with pytest.raises(LookupError):
        shop.run(kind, pay, attempts=3, retry_on=(Exception,))
    assert shop.one.durable.committed == ["work"]


@pytest.mark.parametrize("kind", KINDS)
def test_rolled_back_attempt_is_repeated_up_to_number_of_attempts(shop: RetriedShop, kind: str) -> None:
    def pay() -> None:
        shop.pay()
        if shop.calls < 3:
            raise LookupError("for example a serialization failure")

    shop.run(kind, pay, attempts=3, retry_on=(LookupError,))
    assert (shop.calls, shop.one.durable.committed) == (3, ["work"])
    shop.calls = 0
    with pytest.raises(LookupError):
        shop.run(kind, pay, attempts=2, retry_on=(LookupError,))
    assert shop.calls == 2
