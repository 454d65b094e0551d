"""How many replicas the topics of a program get: two settings of Bascule among the settings of the Kafka client.

Without them, a new topic gets the defaults of the cluster: ``default.replication.factor`` of Kafka is 1 if nobody has set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bascule.core.errors import InvalidInput

#: Settings with this prefix are not passed to librdkafka.
PREFIX: Final = "bascule."
REPLICATION_FACTOR: Final = "bascule.replication.factor"
MIN_INSYNC_REPLICAS: Final = "bascule.min.insync.replicas"
#: Replication factor that means "as the cluster's default".
CLUSTER_DEFAULT: Final = -1


class Replication(NamedTuple):
    """The replicas of a new topic. ``min_insync`` None is the default of the cluster."""

    factor: int
    min_insync: int | None

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the topic."""
        return {} if self.min_insync is None else {"min.insync.replicas": str(self.min_insync)}


def replication_of(kafka: Mapping[str, Any]) -> Replication:
    """Return what the settings of a client say. Raises InvalidInput for a wrong value, or another setting with the prefix."""
    if others := sorted(name for name in kafka if name.startswith(PREFIX) and name not in (REPLICATION_FACTOR, MIN_INSYNC_REPLICAS)):
        raise InvalidInput(f"unknown setting {others[0]!r}; expected {REPLICATION_FACTOR!r} or {MIN_INSYNC_REPLICAS!r}")
    factor, min_insync = _count(kafka, REPLICATION_FACTOR), _count(kafka, MIN_INSYNC_REPLICAS)
    if factor is not None and min_insync is not None and min_insync > factor:
        raise InvalidInput(f"{MIN_INSYNC_REPLICAS}={min_insync} is more than {REPLICATION_FACTOR}={factor}")
    return Replication(CLUSTER_DEFAULT if factor is None else factor, min_insync)


def of_librdkafka(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of Bascule."""
    return {name: value for name, value in settings.items() if not name.startswith(PREFIX)}


def _count(kafka: Mapping[str, Any], name: str) -> int | None:
    if (value := kafka.get(name)) is None:
        return None
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise InvalidInput(f"invalid {name}={value!r}; expected a number of replicas, from 1")
    return count
