"""An environment of Python in which only the packages of an installation can be imported: an import hook hides all others."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HOOK = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

HIDDEN = {hidden!r}
sys.meta_path.insert(0, Hide())
"""


def locked(lock: str) -> set[str]:
    """Return the distributions of a lock file in the root of the repository."""
    return {_plain(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / lock).read_text(), re.MULTILINE)}


def required(extra: str) -> set[str]:
    """Return the distributions that an installation with one extra brings, in this environment."""
    found: set[str] = set()
    waiting = [("bascule", extra)]
    while waiting:
        name, wanted = waiting.pop()
        try:
            requirements = distribution(name).requires or ()
        except PackageNotFoundError:  # for another version of Python
            continue
        for requirement in requirements:
            text, _, marker = requirement.partition(";")
            other, extras = re.findall(r"^([\w.-]+)(?:\[([\w,-]+)\])?", text)[0]
            if "extra ==" in marker and not (wanted and re.search(rf"extra == ['\"]{wanted}['\"]", marker)):
                continue
            for each in (extras or "").split(","):
                if (other, each) not in waiting and (_plain(other) not in found or each):
                    waiting.append((other, each))
            found.add(_plain(other))
    return found


def hidden(kept: Collection[str]) -> set[str]:
    """Return the top-level modules of all installed distributions except Bascule and those in ``kept``."""
    return {
        module
        for module, homes in packages_distributions().items()
        if module.isidentifier() and not {_plain(home) for home in homes} & {*kept, "bascule"}
    }


def environment(directory: Path, kept: Collection[str]) -> dict[str, str]:
    """Return the variables of a Python that can import only the standard library, Bascule and the distributions in ``kept``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(_HOOK.format(hidden=hidden(kept)))
    return {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT / "src")]), "PATH": os.environ["PATH"], "HOME": sys.prefix}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
