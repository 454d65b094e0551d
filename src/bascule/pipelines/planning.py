"""Plans of users' transformations. A user's function may fail or hang, so each plan runs in a thread of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from pyspark.sql import SparkSession

from bascule.core.errors import BasculeError, Scope
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.transformation import NotPlanned, check
from bascule.threads.background import in_background

T = TypeVar("T")

#: How long a pipeline waits until Spark has planned a transformation, in seconds.
PLAN_S: Final = 30.0


class StillPlanning(BasculeError):
    """Spark is still planning a transformation. ``over`` returns whether the pipeline can go on."""

    retriable = True
    scope = Scope.PIPELINE

    def __init__(self, divert: str, over: Callable[[], bool]) -> None:
        super().__init__(f"divert {divert!r}: Spark is still planning the transformation")
        self.over = over


@dataclass(slots=True)
class _Plan(Generic[T]):
    """A call that runs. ``begun_s`` is the time of the monotonic clock when Spark was ready for it."""

    ended: Future[T] = field(default_factory=Future)
    begun_s: float = math.inf

    def over(self) -> bool:
        """Return whether the call has ended or has taken PLAN_S."""
        return self.ended.done() or time.monotonic() >= self.begun_s + PLAN_S


class Plans(Generic[T]):
    """Calls ``work`` for transformations, at most once at a time for each divert. Use it from one thread."""

    def __init__(self, session: Callable[[], SparkSession], work: Callable[[SparkSession, DivertSpec], T]) -> None:
        """``session`` returns a Spark session for one plan; it may wait for Spark."""
        self._session, self._work = session, work
        self._plans: dict[DivertSpec, _Plan[T]] = {}

    def result(self, divert: DivertSpec) -> T:
        """Return the result of a call, which begins now unless it was begun. Raises the error of the call.

        Raises StillPlanning until the call has ended. After PLAN_S it raises NotPlanned instead.
        """
        plan = self._plans.get(divert)
        if plan is None:
            plan = self._plans[divert] = self._begun(divert)
        if plan.ended.done():
            del self._plans[divert]
            return plan.ended.result()
        if plan.over():
            raise NotPlanned(f"divert {divert.name!r}: Spark has not planned the transformation within {PLAN_S:.0f} s")
        raise StillPlanning(divert.name, plan.over)

    def _begun(self, divert: DivertSpec) -> _Plan[T]:
        plan = _Plan[T]()

        def run() -> T:
            session = self._session()
            plan.begun_s = time.monotonic()
            try:
                return self._work(session, divert)
            except SystemExit as error:
                raise NotPlanned(
                    f"divert {divert.name!r}: the transformation tried to end the process (SystemExit: {error.code})"
                ) from error

        plan.ended = in_background(run, f"plan-{divert.name}")
        return plan


class TransformationChecks:
    """Checks each transformation before its pipeline starts for the first time."""

    def __init__(self, session: Callable[[], SparkSession], work: Callable[[DivertSpec, SparkSession], None] | None = None) -> None:
        """``session`` returns a Spark session for one plan. ``work`` raises an error for a transformation that cannot be used."""
        checking = work or check
        self._plans = Plans(session, lambda session, divert: checking(divert, session))
        self._passed: set[DivertSpec] = set()

    def require(self, divert: DivertSpec) -> None:
        """Return normally if the transformation of a divert can be used. Raises InvalidInput, NotRowLocal, NotPlanned, StillPlanning."""
        if divert.transformed and divert not in self._passed:
            self._plans.result(divert)
            self._passed.add(divert)
