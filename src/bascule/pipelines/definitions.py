"""Ingresses that administrators define at run time: how a driver starts, changes and deletes one of them (docs/adr/0026-definitions.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError
from pyspark.errors import PySparkException

from bascule.config.pipeline import Ingress
from bascule.core.errors import BasculeError, Scope
from bascule.core.log import get_log
from bascule.pipelines.failures import described
from bascule.pipelines.holds import Holds
from bascule.pipelines.ingresses import DriverIngresses
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec, ingress_spec
from bascule.writer.control import PipelineDefinition, Steering
from bascule.writer.position import INGRESS, PositionTaken

log = get_log(__name__)


class UnusableDefinition(BasculeError):
    """A definition made at run time has settings that this version of the pipelines cannot use."""

    retriable = False
    scope = Scope.PIPELINE


class DefinedIngresses:
    """The ingresses of one driver that are defined at run time. Performs the effects of ``writer.definitions.DefinitionEffects``."""

    def __init__(
        self, positions: Positions, holds: Holds, ingresses: DriverIngresses, start: Callable[[str], None], drop: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``start`` starts the query of an ingress by its name, and ``drop`` stops the query of a pipeline for good."""
        #: What the driver steers and reports.
        self.steering = Steering(())
        self.specs: dict[str, DivertSpec | IngressSpec] = {}
        self._positions = positions
        self._holds = holds
        self._ingresses = ingresses
        self._start = start
        self._drop = drop
        self._failures: dict[str, str] = {}

    def add(self, pipeline: str, definition: PipelineDefinition) -> bool:
        """Start an ingress. Returns False if this must be repeated. Raises PositionTaken."""

        def act() -> None:
            spec = _spec_of(pipeline, definition.settings, self._positions.pipelines)
            begun = self._positions.definitions().get(pipeline) == definition.id
            if not begun:
                self._positions.forget(pipeline)  # an ingress of the file may have had this name
            if self.steering.add(pipeline):
                self._holds.held.add(pipeline)
            else:
                self._holds.held.discard(pipeline)
            self._ingresses.define(spec, definition.id, begun=begun)
            self._start(spec.name)
            self.specs[pipeline] = spec
            log.info("pipeline defined", pipeline=pipeline, revision=definition.revision, who=definition.by)

        return self._contained(pipeline, act)

    def change(self, pipeline: str, definition: PipelineDefinition) -> bool:
        """Restart an ingress with other settings. Returns False if this must be repeated. Raises PositionTaken."""

        def act() -> None:
            spec = _spec_of(pipeline, definition.settings, self._positions.pipelines)
            self._ingresses.define(spec, definition.id, begun=False)
            self.specs[pipeline] = spec
            self._holds.restart(pipeline)
            log.info("pipeline changed", pipeline=pipeline, revision=definition.revision, who=definition.by)

        return self._contained(pipeline, act)

    def remove(self, pipeline: str) -> bool:
        """Stop an ingress and delete its positions. Returns False if this must be repeated. Raises PositionTaken."""

        def act() -> None:
            self.steering.remove(pipeline)
            self.specs.pop(pipeline, None)
            self._drop(pipeline)
            self._ingresses.remove(pipeline.removeprefix(INGRESS))
            self._positions.forget(pipeline)
            self._holds.held.discard(pipeline)
            log.info("pipeline deleted", pipeline=pipeline)

        return self._contained(pipeline, act)

    def _contained(self, pipeline: str, act: Callable[[], None]) -> bool:
        """Carry out a step, and return whether it is complete. An error is logged once. Raises PositionTaken."""
        try:
            act()
        except PositionTaken:
            raise
        except (BasculeError, PySparkException) as error:
            if self._failures.get(pipeline) != (text := described(error)):
                self._failures[pipeline] = text
                log.warning("could not follow the definition of a pipeline, will retry", pipeline=pipeline, error=text)
            return False
        with suppress(KeyError):
            del self._failures[pipeline]
        return True


def _spec_of(pipeline: str, settings: Mapping[str, Any], pipelines: PipelinesSpec) -> IngressSpec:
    """Return the ingress of a definition. Raises UnusableDefinition."""
    if not pipeline.startswith(INGRESS):
        raise UnusableDefinition(f"{pipeline} is no ingress; this version of the pipelines cannot define it at run time. Upgrade Bascule")
    try:
        one = Ingress.model_validate({**settings, "name": pipeline.removeprefix(INGRESS)})
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise UnusableDefinition(f"the definition of {pipeline} cannot be used: {reason}. Upgrade Bascule, or change it") from error
    return ingress_spec(one, pipelines.masked, keep_user_id=pipelines.keep_user_id)
