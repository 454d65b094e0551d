"""What a driver publishes as consumer groups: the positions of its queries, and why queries of diverts do not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.kafka.history import LagMirror
from bascule.pipelines.positions import IDLE_TIMEOUT_S, Positions
from bascule.writer.position import INGRESS, Position

log = get_log(__name__)

#: Interval, in seconds, at which a driver publishes.
MIRROR_S: Final = 5.0


class LagMirrors:
    """The consumer groups of one driver, each with the name of a query."""

    def __init__(self, positions: Positions, keys_of: Callable[[str], Sequence[str]], moved: Callable[[str], str]) -> None:
        """``keys_of`` returns the keys of the positions of a query, and ``moved`` the last request to move the position of a pipeline."""
        self._positions = positions
        self._keys_of = keys_of
        self._moved = moved
        self._mirrors: dict[str, LagMirror] = {}
        self._told: dict[str, tuple[str, str]] = {}  # the reasons that were published, with the last request to move the position

    def show(self, queries: Collection[str], running: Collection[str]) -> None:
        """Publish the positions of the queries that run. An earlier report may still wait for an answer or a retry."""
        if not self._mirrors and not running:
            return
        try:
            stored = self._positions.stored(IDLE_TIMEOUT_S)
        except Unavailable as error:
            log.warning("could not read positions for the lag, will retry", error=str(error))
            stored = {}
        for name in queries:
            held = (stored.get(key) for key in self._keys_of(name)) if name in running else ()
            offsets = {(at.topic, at.partition): at.offset for at in held if at is not None}
            if offsets or name in self._mirrors:
                self._mirror_of(name).show(offsets)

    def untold(self, reasons: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return the reasons that were not published yet, or whose divert was moved since. A query without a reason runs."""
        due = {name: why for name, why in reasons.items() if self._told.get(name) != (why, self._moved(name))}
        self._told = {name: told for name, told in self._told.items() if reasons.get(name) and name not in due}
        return {name: why for name, why in due.items() if why}

    def tell(self, reasons: Mapping[str, str]) -> None:
        """Publish why queries of diverts do not run, by name.

        The broker shows the reason with the part of the journal that it keeps for them.
        """
        keys = {name: self._positions.key_of(name) for name in reasons if not name.startswith(INGRESS)}
        if not keys:
            return
        try:
            stored: Mapping[str, Position] = self._positions.stored(IDLE_TIMEOUT_S)
        except Unavailable as error:
            log.warning("could not publish the reason why a pipeline stopped", error=str(error))
            return
        for name, key in keys.items():
            self._told[name] = reasons[name], self._moved(name)
            if (at := stored.get(key)) is not None:
                self._mirror_of(name).show({(at.topic, at.partition): at.offset}, reasons[name])

    def drop(self, name: str) -> None:
        """Publish nothing more about a query."""
        if (mirror := self._mirrors.pop(name, None)) is not None:
            mirror.close()
        self._told.pop(name, None)

    def close(self) -> None:
        """Free the clients."""
        for mirror in self._mirrors.values():
            mirror.close()

    def _mirror_of(self, name: str) -> LagMirror:
        if name not in self._mirrors:
            self._mirrors[name] = LagMirror(self._positions.pipelines.kafka, self._positions.group(name))
        return self._mirrors[name]
