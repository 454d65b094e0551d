"""The diverts that are defined at run time, for commands that look at the journal without a driver."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from pydantic import ValidationError

from bascule.config.pipeline import Divert
from bascule.core.log import get_log
from bascule.kafka.admin import Topics
from bascule.kafka.control import ControlTopics
from bascule.pipelines.spec import DivertSpec, PipelinesSpec, divert_spec
from bascule.writer.control import PipelineDefinition
from bascule.writer.reading import READ_TIMEOUT_S

log = get_log(__name__)


def with_defined(pipelines: PipelinesSpec) -> PipelinesSpec:
    """Return the pipelines with the diverts that are defined at run time. Names of the file win. Raises Unavailable."""
    if pipelines.topics.control not in Topics(pipelines.kafka).partitions():
        return pipelines
    with closing(ControlTopics(pipelines.kafka, pipelines.topics)) as topics:
        definitions = topics.controlled_diverts(READ_TIMEOUT_S).definitions
    known = {each.name for each in pipelines.diverts} | {each.name for each in pipelines.ingresses}
    found = (_spec(name, definition) for name, definition in sorted(definitions.items()) if definition is not None and name not in known)
    return replace(pipelines, diverts=(*pipelines.diverts, *(spec for spec in found if spec is not None)))


def _spec(name: str, definition: PipelineDefinition) -> DivertSpec | None:
    try:
        return divert_spec(Divert.model_validate({**definition.settings, "name": name}))
    except ValidationError as error:
        log.warning("definition of a divert ignored", divert=name, error=str(error))
        return None
