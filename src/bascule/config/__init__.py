"""Settings: one tree from file, environment and flags."""

from bascule.core.extras import require

require("cli")

from bascule.config.load import ConfigError, Configuration, Value, load
from bascule.config.pipeline import Divert, Ingress
from bascule.config.settings import Settings

__all__ = ["ConfigError", "Configuration", "Divert", "Ingress", "Settings", "Value", "load"]
