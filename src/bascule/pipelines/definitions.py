"""Pipelines that administrators define at run time: how a driver starts, changes and deletes one (docs/adr/0026-definitions.md, 0028)."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from typing import Any, Final

from pydantic import ValidationError
from pyspark.errors import PySparkException

from bascule.broker.coverage import CoverageMark
from bascule.config.defined import refused
from bascule.config.pipeline import Divert, Ingress
from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.core.log import get_log
from bascule.pipelines.defined_positions import DefinedPositions
from bascule.pipelines.failures import described
from bascule.pipelines.holds import Holds
from bascule.pipelines.ingresses import DriverIngresses
from bascule.pipelines.spec import DivertSpec, IngressSpec, divert_spec, ingress_spec
from bascule.writer.control import PipelineDefinition, Steering, Wishes
from bascule.writer.position import DIVERT, INGRESS, PositionTaken

log = get_log(__name__)

_KINDS: Final[Mapping[str, type[Divert | Ingress]]] = {"divert": Divert, "ingress": Ingress}


class UnusableDefinition(BasculeError):
    """A definition made at run time has settings that this version of the pipelines cannot use."""

    retriable = False
    scope = Scope.PIPELINE


class DefinedPipelines:
    """The pipelines of one driver that are defined at run time. Performs the effects of ``writer.definitions.DefinitionEffects``."""

    def __init__(
        self, positions: DefinedPositions, holds: Holds, ingresses: DriverIngresses, start: Callable[[str], None],
        drop: Callable[[str], None], removed: Callable[[], Container[str]],
    ) -> None:  # fmt: skip
        """``start`` starts the query of a pipeline, and ``drop`` stops it for good.

        ``removed`` returns the diverts that have left the configuration file, and whose messages may not all be carried yet.
        """
        #: What the driver steers and reports.
        self.steering = Steering(())
        self.specs: dict[str, DivertSpec | IngressSpec] = {}
        #: The diverts, by name.
        self.diverts: dict[str, DivertSpec] = {}
        #: What the brokers say about diverts, by pipeline.
        self.covered: Mapping[str, CoverageMark] = {}
        self._positions = positions
        self._holds = holds
        self._ingresses = ingresses
        self._start = start
        self._drop = drop
        self._removed = removed
        self._failures: dict[str, str] = {}

    def usable(self, wishes: Wishes, begun: Mapping[str, str]) -> dict[str, PipelineDefinition]:
        """Return the definitions that can be followed: a divert is not begun before a broker says from where the journal covers it.

        ``begun`` has the ids of the definitions to which positions belong. A divert that has begun needs no broker for that any more, and
        would be deleted with its position if it were left out.
        """
        found = {pipeline: wishes.coverage(pipeline) for pipeline in wishes.definitions if pipeline.startswith(DIVERT)}
        self.covered = {pipeline: covered for pipeline, covered in found.items() if covered is not None}
        return {
            pipeline: each
            for pipeline, each in wishes.definitions.items()
            if pipeline not in found or pipeline in self.covered or begun.get(pipeline) == each.id
        }

    def add(self, pipeline: str, definition: PipelineDefinition) -> bool:
        """Start a pipeline. Returns False if this must be repeated. Raises PositionTaken."""

        def act() -> None:
            spec = self._spec_of(pipeline, definition.settings)
            begun = self._positions.definitions().get(pipeline) == definition.id
            if not begun:
                # a pipeline of the file may have had this name
                self._positions.forget(pipeline, lambda other: other != definition.id)
            if self.steering.add(pipeline):
                self._holds.held.add(pipeline)
            else:
                self._holds.held.discard(pipeline)
            if isinstance(spec, DivertSpec):
                covered = self.covered.get(pipeline)
                if covered is None and not begun:
                    raise Unavailable(f"no broker says from which offset on the journal has the messages for {pipeline}")
                self._positions.take_defined(spec, definition.id, 0 if covered is None else covered.offset)
                self.diverts[spec.name] = spec
            else:
                self._ingresses.define(spec, definition.id, begun=begun)
            self._start(pipeline)
            self.specs[pipeline] = spec
            log.info("pipeline defined", pipeline=pipeline, revision=definition.revision, who=definition.by)

        return self._contained(pipeline, act)

    def change(self, pipeline: str, definition: PipelineDefinition) -> bool:
        """Restart a pipeline with other settings. Returns False if this must be repeated. Raises PositionTaken."""

        def act() -> None:
            spec = self._spec_of(pipeline, definition.settings)
            if isinstance(spec, DivertSpec):
                self.diverts[spec.name] = spec
            else:
                self._ingresses.define(spec, definition.id, begun=False)
            self.specs[pipeline] = spec
            if self.steering.must_hold(pipeline):  # perhaps only since this change: its new user may not consume
                self._holds.held.add(pipeline)
            self._holds.restart(pipeline)
            log.info("pipeline changed", pipeline=pipeline, revision=definition.revision, who=definition.by)

        return self._contained(pipeline, act)

    def remove(self, pipeline: str, definition: str) -> bool:
        """Stop a pipeline and delete its positions. Returns False if this must be repeated.

        Raises PositionTaken, also if another driver has begun the pipeline by another definition than the deleted one (``definition``).
        """

        def act() -> None:
            self.steering.remove(pipeline)
            self.specs.pop(pipeline, None)
            self._drop(pipeline)
            if pipeline.startswith(DIVERT):
                self.diverts.pop(pipeline.removeprefix(DIVERT), None)
            else:
                self._ingresses.remove(pipeline.removeprefix(INGRESS))
            self._positions.forget(pipeline, lambda other: other == definition)
            self._holds.held.discard(pipeline)
            log.info("pipeline deleted", pipeline=pipeline)

        return self._contained(pipeline, act)

    def _spec_of(self, pipeline: str, settings: Mapping[str, Any]) -> DivertSpec | IngressSpec:
        """Return the pipeline of a definition. Raises UnusableDefinition."""
        kind, _, name = pipeline.partition(":")
        if kind not in _KINDS:
            raise UnusableDefinition(f"{pipeline} cannot be defined at run time in this version of the pipelines. Upgrade Bascule")
        if kind == "divert" and name in self._removed():
            raise UnusableDefinition(
                f"a divert {name!r} has left the configuration file, and messages that it took exclusively may not be carried yet."
                " Choose another name, or restart the pipelines when they are"
            )
        # The broker has checked this, too, but code runs in this process.
        if wrong := [key for key in refused(kind) if settings.get(key)]:
            raise UnusableDefinition(f"the definition of {pipeline} cannot be used: {wrong[0]!r} cannot be given at run time. Change it")
        try:
            one = _KINDS[kind].model_validate({**settings, "name": name})
        except ValidationError as error:
            reason = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
            raise UnusableDefinition(f"the definition of {pipeline} cannot be used: {reason}. Upgrade Bascule, or change it") from error
        if isinstance(one, Divert):
            return divert_spec(one)
        pipelines = self._positions.pipelines
        return ingress_spec(one, pipelines.masked, keep_user_id=pipelines.keep_user_id)

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
