"""What the broker reads of the definitions of diverts, and what it covers for one that it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bascule.broker.coverage import ControlledDiverts, CoverageMark, CoveredDivert
from bascule.broker.divert_access import DivertAccess
from bascule.config.audit import Audit as AuditSettings
from bascule.config.pipeline import Divert
from bascule.core.access import AccessRule, AccessRules, CurrentPermissions
from bascule.core.permissions import Permission
from bascule.core.roles import UserRoles
from bascule.core.topics import JournalTopics
from bascule.kafka.admin import Topics
from bascule.kafka.control import ControlTopics
from bascule.server import coverage
from bascule.server.audit import audit_of
from bascule.server.coverage import CoverageControl, _divert_of, _FollowedDivert
from bascule.server.divert_users import DivertUsers
from bascule.writer.control import DEFINITION_KEY, PipelineDefinition, PipelineDeletion
from tests.support.mock_cluster import MockCluster
from tests.unit.server.served import run_async
from tests.unit.server.test_pipelines import cluster, topics  # noqa: F401 - fixtures


@run_async
async def test_definition_that_cannot_be_read_covers_all_addresses(cluster: MockCluster, topics: ControlTopics) -> None:  # noqa: F811
    topics.define("divert:a", PipelineDefinition("1", 2, {"from": "news.*", "to": "t"}))
    topics.define("divert:b", PipelineDefinition("2", 1, {"from": "news", "a setting of a later version": 1}))
    topics._store("definition/divert:c", b"damaged")
    topics.define("ingress:d", PipelineDefinition("3", 1, {"topics": ["news"]}))
    topics.say_covered("a", 4, CoverageMark("1", 1, 9))
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        found = await control.controlled()
        await control.store("a", 7, CoverageMark("1", 2, 8))
        assert found.diverts == {"a": CoveredDivert("1", 2, "news.*"), "b": CoveredDivert("2", 1, "#"), "c": CoveredDivert("", 0, "#")}
        assert found.mark_of("a") == CoverageMark("1", 1, 9)
        assert (await control.controlled()).mark_of("a") == CoverageMark("1", 2, 8)
    finally:
        await control.close()


@run_async
async def test_divert_whose_definition_is_lost_stays_covered_until_somebody_deletes_it(
    cluster: MockCluster,  # noqa: F811
    topics: ControlTopics,  # noqa: F811
) -> None:
    for name in ("a", "b"):
        topics.define(f"divert:{name}", PipelineDefinition("1", 1, {"from": "news", "to": "t"}))
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        assert sorted((await control.controlled()).diverts) == ["a", "b"]
        for name in ("a", "b"):
            topics._store(f"{DEFINITION_KEY}divert:{name}", None)
        assert sorted((await control.controlled()).diverts) == ["a", "b"]
        topics.undefine("divert:a", PipelineDeletion())
        assert sorted((await control.controlled()).diverts) == ["b"]
    finally:
        await control.close()


@run_async
async def test_topic_that_was_deleted_is_created_so_that_an_epoch_can_begin(
    cluster: MockCluster,  # noqa: F811
) -> None:
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        assert await control.controlled() == ControlledDiverts({}, {})
        assert Topics(cluster.kafka).partitions() == {"bascule.control": 1}, "not created by Kafka, with settings of its own"
    finally:
        await control.close()


@run_async
async def test_settings_of_a_definition_are_checked_once(
    cluster: MockCluster,  # noqa: F811
    topics: ControlTopics,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []

    def divert_of(name: str, definition: PipelineDefinition | None) -> _FollowedDivert:
        checked.append(name)
        return _divert_of(name, definition)

    monkeypatch.setattr(coverage, "_divert_of", divert_of)
    topics.define("divert:a", PipelineDefinition("1", 1, {"from": "a", "to": "t"}))
    topics.define("divert:b", PipelineDefinition("2", 1, {"from": "b", "to": "t"}))
    control = CoverageControl(cluster.kafka, JournalTopics())
    try:
        assert await control.controlled() == await control.controlled()
        topics.define("divert:a", PipelineDefinition("1", 2, {"from": "c", "to": "t"}))
        assert (await control.controlled()).diverts["a"] == CoveredDivert("1", 2, "c")
        assert checked == ["a", "b", "a"]
    finally:
        await control.close()


@run_async
async def test_active_broker_stores_its_decisions_about_diverts_with_a_user_and_follows_permissions(
    cluster: MockCluster,  # noqa: F811
    topics: ControlTopics,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "audit.jsonl"
    permissions = CurrentPermissions(AccessRules((), UserRoles({})))
    configured = [Divert.model_validate({"name": name, "from": "orders.#", "user": user}) for name, user in (("a", "ann"), ("b", None))]
    topics.define("divert:b", PipelineDefinition("1", 1, {"from": "news", "to": "t", "user": "eve"}))  # the file has another one
    topics.define("divert:c", PipelineDefinition("2", 1, {"from": "news", "to": "t", "user": "bob"}))
    topics.define("divert:d", PipelineDefinition("3", 1, {"from": "news", "a setting of a later version": 1, "user": "bob"}))
    topics.say_access("gone", DivertAccess("ann", "x"))
    topics._store("access/divert:a", b"damaged")
    control = CoverageControl(
        cluster.kafka, JournalTopics(), users=DivertUsers(configured, permissions, audit_of(AuditSettings(file=file), {}))
    )  # fmt: skip

    async def decided() -> dict[str, tuple[str, str, bool]]:
        await control.controlled()
        await control.decide_access()
        return {name: (each.user, each.address, each.allowed) for name, each in topics.controlled_diverts(10).access.items()}

    try:
        assert await decided() == {"a": ("ann", "orders.#", False), "c": ("bob", "news", False)}
        assert topics.wishes(10).access["divert:a"].reason == "user 'ann' has no permission 'consume' on address 'orders.#'"
        rule = AccessRule("orders.#", {Permission.CONSUME: frozenset({"sales"})})
        permissions.now = AccessRules((rule,), UserRoles({"sales": ["ann"]}))
        assert await decided() == {"a": ("ann", "orders.#", True), "c": ("bob", "news", False)}
        topics.undefine("divert:c", PipelineDeletion())
        assert await decided() == {"a": ("ann", "orders.#", True)}
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines[:2] = sorted(lines[:2], key=lambda line: str(line["divert"]))
        assert [(line["who"], line["action"], line["on"], line["divert"], line["allowed"]) for line in lines] == [
            ("ann", "consume", "orders.#", "a", False), ("bob", "consume", "news", "c", False), ("ann", "consume", "orders.#", "a", True),
        ]  # fmt: skip
    finally:
        await control.close()
