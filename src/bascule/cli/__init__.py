"""The command ``bascule``. Commands import what they run only when they run: ``--help`` must be quick."""

from bascule.core.extras import require

require("cli")
