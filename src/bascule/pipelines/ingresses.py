"""The ingresses of one driver: their source partitions, and what their queries run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.pipelines.jobs import Resident, Startable
from bascule.pipelines.positions import Positions, Source
from bascule.pipelines.queries import Query
from bascule.pipelines.spec import IngressSpec
from bascule.pipelines.tasks import IngressTask
from bascule.writer.claims import Claim
from bascule.writer.position import INGRESS, position_key

log = get_log(__name__)


class DriverIngresses:
    """The ingresses that one driver runs: those of its configuration, and those that were defined at run time."""

    def __init__(
        self, positions: Positions, ingresses: Iterable[IngressSpec], held: Container[str], cores: Callable[[], int],
        resident: Callable[[str, Sequence[Resident]], Startable],
    ) -> None:  # fmt: skip
        """``held`` are the pipelines that must not run, ``cores`` returns the number of tasks that Spark can run side by side.

        ``resident`` returns what starts the tasks of a pipeline.
        """
        self.specs = {ingress.name: ingress for ingress in ingresses if ingress.enabled}
        self.sources: dict[str, dict[Source, str]] = {}
        self.claims: dict[str, tuple[Claim, ...]] = {}
        self._positions = positions
        self._held = held
        self._cores = cores
        self._resident = resident
        #: Ids of definitions made at run time, and the ingresses that are registered with theirs.
        self._definitions: dict[str, str] = {}
        self._begun: set[str] = set()

    def define(self, spec: IngressSpec, definition: str, *, begun: bool) -> None:
        """Add an ingress that was defined at run time, or change it. ``begun``: its positions are stored with this definition."""
        self.specs[spec.name] = spec
        self._definitions[spec.name] = definition
        if begun:
            self._begun.add(spec.name)

    def remove(self, name: str) -> None:
        """Forget an ingress that was defined at run time."""
        for known in (self.specs, self.sources, self._definitions):
            known.pop(name, None)
        self.claims.pop(f"{INGRESS}{name}", None)
        self._begun.discard(name)

    def keys(self, name: str) -> list[str]:
        """Return the keys of the positions of an ingress."""
        return [position_key(f"{INGRESS}{name}", *source) for source in self.sources.get(name, ())]

    def query(self, name: str) -> Startable | None:
        """Take over the source partitions of an ingress, and return what starts its tasks, or None if there is nothing to start."""
        ingress, pipeline = self.specs[name], f"{INGRESS}{name}"
        sources = self._matching(ingress)
        self.sources[name] = sources
        # Register the ingress even without a topic: then it reads topics that appear later from their first record.
        positions = self._positions.take_sources(
            pipeline, sources, ingress.start, ingress.names, self._definitions.get(name, ""), begun=name in self._begun
        )
        if name in self._definitions:
            self._begun.add(name)
        claims = tuple(self._positions.claim(position_key(pipeline, at.topic, at.partition), at) for at in positions)
        self.claims[pipeline] = claims
        if pipeline in self._held:
            return None
        if not sources:
            log.warning("ingress has no topic yet", ingress=name, topics=ingress.topics or ingress.pattern)
            return None
        count = min(len(claims), ingress.tasks or self._cores())
        return self._resident(pipeline, [IngressTask(self._positions.pipelines, claims[number::count], ingress) for number in range(count)])

    def refresh(self, queries: Mapping[str, Query]) -> None:
        """Restart the queries of ingresses whose topics have changed. Raises Unavailable."""
        for name, ingress in self.specs.items():
            query = queries.get(f"{INGRESS}{name}")
            if query is not None and query.stopped is None and self._matching(ingress) != self.sources.get(name):
                log.info("topics of ingress changed", ingress=name)
                query.restart()

    def pass_over(self) -> None:
        """Advance the positions of sources whose tasks have ended, past transaction markers: nobody reads them until the next start."""
        claims = [claim for held in self.claims.values() for claim in held]
        try:
            self._positions.pass_over(dict.fromkeys(claims))
        except Unavailable as error:
            log.warning("could not advance positions of idle sources", error=str(error))

    def _matching(self, ingress: IngressSpec) -> dict[Source, str]:
        """Return the source partitions of an ingress with the id of their topic. A recreated topic has another id."""
        there = self._positions.topics.partitions()
        wanted = [topic for topic in there if ingress.names(topic)]
        if ingress.pattern is not None:
            wanted = [topic for topic in wanted if not topic.startswith("__") and topic not in self._positions.pipelines.topics.reserved]
        ids = self._positions.topics.ids(wanted)
        return {(topic, partition): topic_id for topic, topic_id in ids.items() for partition in range(there[topic])}
