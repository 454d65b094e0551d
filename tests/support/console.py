"""The console of a broker, as a reader in a real browser sees it."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from bascule.core.defaults import OWNER_TOKEN_FILE
from tests.support.chromium import run_script
from tests.support.speed import SLOWNESS
from tests.support.system import System

#: Longest wait for one text, in ms.
STEP_MS = 20_000 * SLOWNESS


class Console:
    """The console of a broker whose owner looks at it."""

    def __init__(self, admin_url: str, data_dir: Path) -> None:
        self._admin_url = admin_url
        self._token = data_dir / OWNER_TOKEN_FILE

    @classmethod
    def of(cls, system: System) -> Self:
        """Return the console of a broker."""
        return cls(f"http://127.0.0.1:{system.admin_port}", system.data_dir)

    def shows(self, title: str, *texts: str, path: str = "") -> None:
        """Open a page, and return when it shows all texts, in which a line break is a space. Raises ScriptFailed.

        ``path`` is needed for a page that is not in the navigation.
        """
        with TemporaryDirectory() as directory:
            run_script("visit.mjs", Path(directory), {
                "ADMIN": self._admin_url, "TOKEN": self._token.read_text() if self._token.exists() else "",
                "VISITS": json.dumps([{"title": title, "path": path, "texts": texts}]), "WAIT_MS": str(int(STEP_MS)),
            })  # fmt: skip
