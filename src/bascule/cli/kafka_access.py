"""How the commands that use Bascule's own topics log in to the embedded Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bascule.core.errors import InvalidInput

if TYPE_CHECKING:
    from bascule.config import Settings


#: What to do for a command that reads the topics of a running installation.
RUNNING_KAFKA: Final = "for the Kafka of `bascule up`, set BASCULE_KAFKA__BOOTSTRAP_SERVERS=HOST:PORT"


def with_own_access(settings: Settings, remedy: str = RUNNING_KAFKA) -> Settings:
    """Return the settings with Bascule's login if they name the plain listener of the embedded Kafka on the data directory.

    Raises InvalidInput, whose text ends with the ``remedy``, if they name no Kafka.
    """
    if settings.kafka.bootstrap_servers is None:
        raise InvalidInput(f"kafka.bootstrap_servers is not set; {remedy}")
    from bascule.embedded.protection import own_access

    given = {"bootstrap.servers": settings.kafka.bootstrap_servers, **settings.kafka.client}
    client = own_access(settings.embedded.data_dir, given)
    servers = client.pop("bootstrap.servers")
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": servers, "client": client})
    return settings.model_copy(update={"kafka": kafka})
