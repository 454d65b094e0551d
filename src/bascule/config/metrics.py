"""Settings of a server of metrics."""

from __future__ import annotations

from pydantic import Field

from bascule.config.fields import Port, Section
from bascule.config.reload_effect import AtRestart


class MetricsSection(Section):
    """A section of settings with a server of metrics."""

    metrics_port: AtRestart[Port | None] = Field(
        default=None, description="Port of the metrics for Prometheus; 0 = any free port, unset = none"
    )
    metrics_host: AtRestart[str] = Field(
        default="127.0.0.1", description="Address on which the metrics are served, without a login and TLS"
    )
