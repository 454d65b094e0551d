"""The command ``bascule``. Commands import the modules that they run only when they run, so that ``--help`` is quick."""

from bascule.core.extras import require

require("cli")
