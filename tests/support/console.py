"""The console of a broker, as a reader in a real browser sees it."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from bascule.core.defaults import OWNER_TOKEN_FILE
from tests.support.chromium import run_script
from tests.support.speed import SLOWNESS
from tests.support.system import System

#: Longest wait for one text, in ms.
STEP_MS = 20_000 * SLOWNESS


class Console:
    """The console of a broker whose owner looks at it."""

    def __init__(self, system: System) -> None:
        self._system = system

    def shows(self, title: str, *texts: str, path: str = "") -> None:
        """Open a page, and return when it shows all texts, in which a line break is a space. Raises ScriptFailed.

        ``path`` is needed for a page that is not in the navigation.
        """
        token = self._system.data_dir / OWNER_TOKEN_FILE
        with TemporaryDirectory() as directory:
            run_script("visit.mjs", Path(directory), {
                "ADMIN": f"http://127.0.0.1:{self._system.admin_port}", "TOKEN": token.read_text() if token.exists() else "",
                "VISITS": json.dumps([{"title": title, "path": path, "texts": texts}]), "WAIT_MS": str(int(STEP_MS)),
            })  # fmt: skip
