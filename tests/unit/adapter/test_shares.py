"""A worker pool is fair: each endpoint can get a thread at any time, and busy endpoints have equal numbers of threads."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bascule.adapter.inbound.shares import PoolShares
from bascule.core.errors import InvalidInput


def taken(shares: PoolShares[str], *wanting: str) -> list[str]:
    """Return the members that get the free threads, if ``wanting`` want as many as possible."""
    got = []
    while found := [member for member in shares.candidates() if member in wanting]:
        shares.take(found[0])
        got.append(found[0])
    return got


def pool(threads: int, **most: int) -> PoolShares[str]:
    shares: PoolShares[str] = PoolShares(threads)
    for member, count in most.items():
        shares.join(member, count)
    return shares


def test_single_endpoint_may_use_its_worker_count_up_to_pool_size() -> None:
    assert taken(pool(4, a=3), "a") == ["a"] * 3
    assert taken(pool(4, a=9), "a") == ["a"] * 4


def test_pool_threads_are_assigned_round_robin() -> None:
    shares = pool(6, a=6, b=6)
    assert taken(shares, "a", "b") == ["a", "b"] * 3
    shares.give_back("b")
    shares.give_back("a")
    assert taken(shares, "a", "b") == ["a", "b"]


def test_busy_endpoint_leaves_one_thread_for_each_other_endpoint() -> None:
    shares = pool(4, slow=4, b=4, c=4)
    assert taken(shares, "slow") == ["slow"] * 2
    assert taken(shares, "b") == ["b"]
    assert taken(shares, "c") == ["c"]
    assert taken(shares, "slow", "b", "c") == []
    shares.give_back("slow")
    shares.give_back("b")
    assert taken(shares, "slow", "b") == ["b", "slow"]


def test_pool_refuses_more_endpoints_than_threads() -> None:
    shares = pool(2, a=1, b=1)
    with pytest.raises(InvalidInput, match="a pool of 2 threads cannot serve more than 2 endpoints"):
        shares.join("c", 1)
    shares.leave("a")
    shares.join("c", 1)
    assert sorted(shares.members) == ["b", "c"]


def test_endpoint_that_joins_busy_pool_gets_first_free_thread() -> None:
    shares = pool(2, slow=2)
    assert taken(shares, "slow") == ["slow"] * 2
    shares.join("quick", 2)
    assert taken(shares, "slow", "quick") == []
    shares.give_back("slow")
    assert taken(shares, "slow", "quick") == ["quick"]


def test_hanging_threads_are_replaced_up_to_limit_of_endpoint_and_then_reduce_its_share() -> None:
    shares = pool(4, bad=2, good=4)
    for replaced in range(2):
        taken(shares, "bad")
        shares.hang("bad")
        assert (shares.wanted, shares.hanging) == (4, replaced + 1)
    taken(shares, "bad")
    shares.hang("bad")
    assert shares.wanted == 3
    assert taken(shares, "bad", "good") == ["good", "good"]
    shares.hang("bad")
    assert (shares.wanted, shares.hanging) == (2, 4)
    assert taken(shares, "bad", "good") == []
    shares.end("bad")
    assert taken(shares, "bad", "good") == ["bad"]


def test_threads_of_departed_endpoint_are_free_only_after_return() -> None:
    shares = pool(2, a=2)
    taken(shares, "a")
    shares.leave("a")
    shares.join("b", 2)
    assert taken(shares, "b") == []
    shares.give_back("a")
    assert taken(shares, "b") == ["b"]
    shares.hang("a")
    shares.end("a")
    assert (shares.members, shares.at_work, shares.hanging) == (["b"], 1, 0)


class SharedPool(RuleBasedStateMachine):
    """Endpoints join, leave, take threads, return them and hang, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: PoolShares[int] = PoolShares(4)
        self.at_work: list[int] = []
        self.hanging: list[int] = []
        self.most: list[int] = []

    @precondition(lambda self: len(self.shares.members) < 4)
    @rule(most=st.integers(1, 6))
    def join(self, most: int) -> None:
        self.shares.join(len(self.most), most)
        self.most.append(min(most, 4))

    @precondition(lambda self: self.shares.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.shares.leave(data.draw(st.sampled_from(self.shares.members)))

    @precondition(lambda self: self.shares.candidates())
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.shares.candidates()))
        self.shares.take(member)
        self.at_work.append(member)

    @precondition(lambda self: self.at_work)
    @rule(data=st.data(), hangs=st.booleans())
    def finish(self, data: st.DataObject, hangs: bool) -> None:
        member = self.at_work.pop(data.draw(st.integers(0, len(self.at_work) - 1)))
        if hangs:
            self.shares.hang(member)
            self.hanging.append(member)
        else:
            self.shares.give_back(member)

    @precondition(lambda self: self.hanging)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.shares.end(self.hanging.pop(data.draw(st.integers(0, len(self.hanging) - 1))))

    @invariant()
    def counts_match_model(self) -> None:
        assert (self.shares.at_work, self.shares.hanging) == (len(self.at_work), len(self.hanging))

    @invariant()
    def pool_has_enough_threads(self) -> None:
        assert len(self.at_work) + bool(self.shares.candidates()) <= self.shares.wanted

    @invariant()
    def idle_member_gets_next_free_thread(self) -> None:
        """Hanging threads that have been replaced do not count."""
        idle = [each for each in self.shares.members if each not in self.at_work and self.hanging.count(each) <= self.most[each]]
        if idle and len(self.at_work) < self.shares.wanted:
            assert self.shares.candidates()[0] in idle


SharedPool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSharedPool = SharedPool.TestCase
