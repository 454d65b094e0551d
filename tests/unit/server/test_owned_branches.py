"""A transaction branch belongs to the user that has prepared it: others neither see nor end it, unless they may recover."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bascule.client import ConnectionFactory, Queue
from bascule.core.errors import BasculeError
from bascule.core.xid import Xid
from bascule.server.actions import act
from bascule.server.admin_access import LOCAL
from bascule.xa import Vote
from bascule.xa.errors import BranchHeuristic, ResourceError
from bascule.xa.jms import JmsResource
from bascule.xa.xid import branch, new_gtrid
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["kafka"]
BILLS = Queue("bills")
WORDS = ("send", "consume", "browse", "createAddress", "createDurableQueue", "createNonDurableQueue")
RULES = [
    {"match": "$management", "manage": ["*"], "recover": ["recovery"]},
    {"match": "#", **{word: ["*"] for word in WORDS}},
]
USERS = {
    "broker": {
        "users": {"ann": "a", "bob": "b", "rex": "r"}, "roles": {"shops": ["ann", "bob"], "recovery": ["rex"]}, "allow_anonymous": True,
    }
}  # fmt: skip
OWNED: dict[str, Any] = {**USERS, "permission": RULES}
REFUSED = r"user 'bob' has no permission 'recover' on address '\$management'"


def resource_of(broker: Broker, user: str | None) -> JmsResource:
    login = {} if user is None else {"user": user, "password": user[0]}
    return JmsResource("jms", f"amqp://127.0.0.1:{broker.ready[-1]}", timeout_s=SOON_S, **login)


def prepared(broker: Broker, user: str | None) -> Xid:
    xid = branch(new_gtrid("shop", 0), "jms")
    resource = resource_of(broker, user)
    resource.start(xid, timeout_s=60).send(BILLS, "bill")
    resource.end(xid, success=True)
    assert resource.prepare(xid) is Vote.YES
    resource.close()
    return xid


def as_user(broker: Broker, user: str | None, does: Callable[[JmsResource], Any]) -> Any:
    resource = resource_of(broker, user)
    try:
        return does(resource)
    finally:
        resource.close()


def bills(broker: Broker) -> int:
    url = f"amqp://127.0.0.1:{broker.ready[-1]}"
    with ConnectionFactory(url, timeout_s=SOON_S, user="ann", password="a").connect() as context:
        return len(list(context.browse(BILLS)))


@pytest.mark.parametrize("restarts", [False, True])
@run_async
async def test_another_user_neither_sees_nor_ends_a_branch_also_after_a_restart(
    kafka: KafkaInMemory, tmp_path: Path, restarts: bool
) -> None:
    async with serving(kafka, tmp_path, **OWNED) as broker:
        xid = await called(prepared, broker, "ann")
        if not restarts:
            await check(broker, xid)
    if restarts:
        async with serving(kafka, tmp_path, **OWNED) as broker:
            await check(broker, xid)


async def check(broker: Broker, xid: Xid) -> None:
    assert await called(as_user, broker, "bob", lambda bob: list(bob.recover())) == []
    for ends in (lambda bob: bob.commit(xid), lambda bob: bob.rollback(xid), lambda bob: bob.forget(xid)):
        with pytest.raises(ResourceError, match=REFUSED):
            await called(as_user, broker, "bob", ends)
    assert await called(bills, broker) == 0
    for user in ("ann", "rex"):
        assert await called(as_user, broker, user, lambda resource: list(resource.recover())) == [xid]
    await called(as_user, broker, "ann", lambda ann: ann.commit(xid))
    assert await called(bills, broker) == 1


@run_async
async def test_a_recovery_manager_ends_the_branches_of_all_users(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, **OWNED) as broker:
        first, second = [await called(prepared, broker, user) for user in ("ann", "bob")]
        assert set(await called(as_user, broker, "rex", lambda rex: list(rex.recover()))) == {first, second}
        await called(as_user, broker, "rex", lambda rex: rex.commit(first))
        await called(as_user, broker, "rex", lambda rex: rex.rollback(second))
        assert await called(bills, broker) == 1
        assert await called(as_user, broker, "rex", lambda rex: list(rex.recover())) == []


@run_async
async def test_only_the_owner_forgets_what_an_administrator_has_done_also_after_a_restart(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, **OWNED) as broker:
        xid = await called(prepared, broker, "ann")
        await act(broker.node, LOCAL, "branches/rollback", {"xid": str(xid)})
    async with serving(kafka, tmp_path, **OWNED) as broker:
        assert await called(as_user, broker, "bob", lambda bob: list(bob.recover())) == []
        with pytest.raises(ResourceError, match=REFUSED):
            await called(as_user, broker, "bob", lambda bob: bob.forget(xid))
        with pytest.raises(BranchHeuristic):
            await called(as_user, broker, "ann", lambda ann: ann.commit(xid))
        await called(as_user, broker, "ann", lambda ann: ann.forget(xid))
        assert await called(as_user, broker, "ann", lambda ann: list(ann.recover())) == []


@run_async
async def test_a_branch_of_a_client_without_a_login_belongs_to_nobody(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, **OWNED) as broker:
        xid = await called(prepared, broker, None)
        await called(as_user, broker, "bob", lambda bob: bob.commit(xid))
        assert await called(bills, broker) == 1


@run_async
async def test_without_permissions_every_user_may_end_every_branch(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, **USERS) as broker:
        xid = await called(prepared, broker, "ann")
        await called(as_user, broker, "bob", lambda bob: bob.commit(xid))
        assert await called(bills, broker) == 1


@run_async
async def test_transaction_with_the_xid_of_another_users_branch_is_rolled_back(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path, **OWNED) as broker:
        xid = await called(prepared, broker, "ann")

        def prepares_too(bob: JmsResource) -> None:
            bob.start(xid, timeout_s=60).send(BILLS, "other")
            bob.end(xid, success=True)
            bob.prepare(xid)

        with pytest.raises(BasculeError, match="already prepared"):
            await called(as_user, broker, "bob", prepares_too)
        await called(as_user, broker, "ann", lambda ann: ann.commit(xid))
        assert await called(bills, broker) == 1
