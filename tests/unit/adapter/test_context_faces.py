"""Contexts of a JmsConnectionFactory have the methods of the client's contexts, with the same signatures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from bascule.adapter.outbound import JmsConnectionFactory
from bascule.adapter.outbound.async_contexts import AsyncPooledContext, AsyncTransactionContext
from bascule.adapter.outbound.contexts import PooledContext, TransactionContext
from bascule.client import AsyncConsumer, AsyncContext, ConnectionFactory, Consumer, Context
from bascule.client.async_branch import AsyncBranchConsumer, AsyncBranchContext
from bascule.client.async_managed import AsyncManagedConsumer
from bascule.client.branch import BranchConsumer, BranchContext
from bascule.client.managed import ManagedConsumer
from tests.unit.client.test_faces import public, signature

#: Classes of contexts, and the client's classes. Producers are those of the client itself.
INTERFACES: Final[dict[type, type]] = {
    TransactionContext: Context,
    PooledContext: Context,
    BranchContext: Context,
    BranchConsumer: Consumer,
    ManagedConsumer: Consumer,
    AsyncTransactionContext: AsyncContext,
    AsyncPooledContext: AsyncContext,
    AsyncBranchContext: AsyncContext,
    AsyncBranchConsumer: AsyncConsumer,
    AsyncManagedConsumer: AsyncConsumer,
}


def methods() -> Iterator[tuple[type, str]]:
    for context, client in INTERFACES.items():
        yield from ((context, name) for name in public(client))


@pytest.mark.parametrize("context", INTERFACES, ids=lambda context: context.__name__)
def test_transaction_contexts_have_same_public_names_as_client_contexts(context: type) -> None:
    assert set(public(context)) == set(public(INTERFACES[context]))


@pytest.mark.parametrize(("context", "name"), list(methods()), ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_methods_of_transaction_contexts_have_client_signatures(context: type, name: str) -> None:
    here, there = public(context)[name], public(INTERFACES[context])[name]
    assert isinstance(here, property) == isinstance(there, property)
    assert signature(here) == signature(there)


@pytest.mark.parametrize("name", ["connect", "connect_async"])
def test_connect_of_adapter_factory_has_client_signature(name: str) -> None:
    here, there = (signature(getattr(factory, name)) for factory in (JmsConnectionFactory, ConnectionFactory))
    assert here == there


def test_transaction_contexts_use_client_producers() -> None:
    here: dict[str, Any] = public(TransactionContext)
    assert here["producer"] is public(Context)["producer"]
    assert public(AsyncTransactionContext)["producer"] is public(AsyncContext)["producer"]
