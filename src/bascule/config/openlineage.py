"""Settings of the OpenLineage events of pipelines."""

from __future__ import annotations

import urllib.parse

from pydantic import Field, field_validator

from bascule.config.fields import Section
from bascule.config.reload_effect import AtRestart
from bascule.core.masking import mask_url


class OpenLineage(Section):
    """Events about the runs of diverts and ingresses, for a receiver of OpenLineage. Needs the extra ``openlineage``."""

    url: AtRestart[str | None] = Field(
        default=None,
        description="URL of the receiver, such as `http://marquez:5000`; events go to its path `/api/v1/lineage`. Unset = none",
    )
    namespace: AtRestart[str | None] = Field(
        default=None, min_length=1, description="Namespace of the jobs; unset = `bascule.` and the `id` of the bridge"
    )
    jms_namespace: AtRestart[str | None] = Field(
        default=None, min_length=1, description="Namespace of the JMS destinations; unset = `jms://` and the `id` of the bridge"
    )
    kafka_namespace: AtRestart[str | None] = Field(
        default=None,
        min_length=1,
        description="Namespace of Kafka topics; unset = `kafka://` and the first of `kafka.bootstrap_servers`",
    )
    running_s: AtRestart[float] = Field(
        default=300.0, ge=1, description="Interval, in seconds, of the events RUNNING of a pipeline that continues"
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{mask_url(url)!r} is not a URL; write http://HOST:PORT or https://HOST:PORT")
        if "@" in parts.netloc:
            raise ValueError("a URL with a password is shown in logs; use the variables OPENLINEAGE__TRANSPORT__AUTH__... instead")
        return url
