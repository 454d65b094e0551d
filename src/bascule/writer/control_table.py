"""What the records of ``PREFIX.control`` say about pipelines, without IO (docs/adr/0022-control.md).

A record that cannot be read concerns the pipeline that its key names, and nobody else: that pipeline must not run until a later record
replaces the damaged one, because the damaged one may be the wish to pause it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from bascule.broker.coverage import CoverageMark
from bascule.broker.divert_access import DivertAccess
from bascule.writer.control import (
    ACCESS_KEY,
    COVERED_KEY,
    DEFINITION_KEY,
    DELETED_KEY,
    KINDS,
    OFFSETS_KEY,
    RESTART_KEY,
    WANTED_KEY,
    OffsetsWish,
    PipelineDefinition,
    PipelineDeletion,
    RestartWish,
    UnreadableControl,
    Wish,
    Wishes,
    decoded,
)
from bascule.writer.redrive import JOB_KEY, RedriveJob, UnreadableRedrive

#: Names of pipelines in keys: the configuration accepts no others.
_PIPELINE: Final = re.compile(rf"(?:{'|'.join(map(re.escape, KINDS.values()))})[A-Za-z0-9][A-Za-z0-9._-]*")

D = TypeVar("D", Wish, RestartWish, OffsetsWish, PipelineDefinition, PipelineDeletion)


class ControlRecord(NamedTuple):
    """The newest record of a key: its value, its offset, and its place in words."""

    value: bytes
    offset: int
    place: str


#: Is told about a record without effect: the place of the record, and why.
Skipped = Callable[[str, str], None]


def wishes_of(table: Mapping[str, ControlRecord], skipped: Skipped, job_skipped: Skipped) -> Wishes:
    """Return all wishes and definitions, and why pipelines are held whose records cannot be read.

    A damaged request to restart holds nothing: it does not say whether the pipeline may run. A damaged deletion deletes nothing. A damaged
    request to move positions has no
    effect once an administrator has paused, resumed, stopped or restarted the pipeline after it.
    """
    unreadable: dict[str, dict[str, str]] = {}

    def readable(prefix: str, kind: type[D]) -> dict[str, D]:
        found: dict[str, D] = {}
        for key, record in table.items():
            if key.startswith(prefix):
                pipeline = named_pipeline(key, prefix, record.place, skipped)
                if pipeline is None:
                    continue
                try:
                    found[pipeline] = decoded(kind, record.value, record.place)
                except UnreadableControl as error:
                    if prefix in (RESTART_KEY, DELETED_KEY):
                        skipped(record.place, str(error))
                    else:
                        unreadable.setdefault(pipeline, {})[prefix] = str(error)
        return found

    states, restarts = readable(WANTED_KEY, Wish), readable(RESTART_KEY, RestartWish)
    offsets, definitions = readable(OFFSETS_KEY, OffsetsWish), readable(DEFINITION_KEY, PipelineDefinition)
    for pipeline in [pipeline for pipeline, reasons in unreadable.items() if OFFSETS_KEY in reasons]:
        decisions = [f"{prefix}{pipeline}" for prefix, found in ((WANTED_KEY, states), (RESTART_KEY, restarts)) if pipeline in found]
        record = table[f"{OFFSETS_KEY}{pipeline}"]
        if any(table[key].offset > record.offset for key in decisions):
            skipped(record.place, unreadable[pipeline].pop(OFFSETS_KEY))
    return Wishes(
        states, restarts, offsets, definitions, _redrives(table, job_skipped), _covered(table, skipped),
        {pipeline: reasons for pipeline, reasons in unreadable.items() if reasons}, _access(table, skipped),
        deleted=frozenset(readable(DELETED_KEY, PipelineDeletion)),
        version=version_of({key: record.offset for key, record in table.items()}),
    )  # fmt: skip


def version_of(offsets: Mapping[str, int]) -> int:
    """Return ``Wishes.version`` for the offsets of records by key."""
    return max((offset + 1 for key, offset in offsets.items() if key.startswith((DEFINITION_KEY, DELETED_KEY))), default=0)


def named_pipeline(key: str, prefix: str, place: str, skipped: Skipped) -> str | None:
    """Return the pipeline that a key with a prefix names; None, which ``skipped`` is told, if no pipeline may have this name."""
    pipeline = key.removeprefix(prefix)
    if _PIPELINE.fullmatch(pipeline) is not None:
        return pipeline
    skipped(place, f"{place}: the key names no pipeline")
    return None


def covered_pipeline(key: str) -> str:
    """Return the pipeline of a key with COVERED_KEY."""
    return key.removeprefix(COVERED_KEY).rpartition("/")[0]


def _redrives(table: Mapping[str, ControlRecord], skipped: Skipped) -> dict[str, RedriveJob]:
    """Return the jobs by id. Nothing else depends on one that cannot be read."""
    found: dict[str, RedriveJob] = {}
    for key, record in table.items():
        if key.startswith(JOB_KEY):
            try:
                found[key.removeprefix(JOB_KEY)] = RedriveJob.decode(record.value, record.place)
            except UnreadableRedrive as error:
                skipped(record.place, str(error))
    return found


def _covered(table: Mapping[str, ControlRecord], skipped: Skipped) -> dict[str, tuple[CoverageMark, ...]]:
    """Return the marks by pipeline. The broker stores one that cannot be read again, in its next epoch at the latest."""
    found: dict[str, tuple[CoverageMark, ...]] = {}
    for key, record in table.items():
        if key.startswith(COVERED_KEY):
            try:
                mark = decoded(CoverageMark, record.value, record.place)
            except UnreadableControl as error:
                skipped(record.place, str(error))
            else:
                pipeline = covered_pipeline(key)
                found[pipeline] = (*found.get(pipeline, ()), mark)
    return found


def _access(table: Mapping[str, ControlRecord], skipped: Skipped) -> dict[str, DivertAccess]:
    """Return the decisions by pipeline. The active broker makes one that cannot be read again, and its divert waits."""
    found: dict[str, DivertAccess] = {}
    for key, record in table.items():
        if key.startswith(ACCESS_KEY):
            try:
                found[key.removeprefix(ACCESS_KEY)] = decoded(DivertAccess, record.value, record.place)
            except UnreadableControl as error:
                skipped(record.place, str(error))
    return found
