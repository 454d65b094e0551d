"""Executes the steps of an image definition in a clean directory, without a container: COPY, RUN, WORKDIR, ARG, ENV of one stage.

Absolute paths of the image become paths below the directory, and pip uses its cache. The base image is this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

#: First parts of the paths that the steps write.
OWN_PATHS = re.compile(r"(?<![\w./-])/(opt|src|build|wheels)\b")
#: Steps that change the system instead of a directory of the image.
OF_THE_SYSTEM = ("apt-get ", "useradd ", 'if [ "$BASCULE_COMPILE" = 1 ]')


@dataclass
class Stage:
    """A stage: its base, and its steps as (instruction, rest)."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(definition: str) -> dict[str, Stage]:
    """Return the named stages of an image definition."""
    lines = (line for line in definition.splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for step in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if not step.strip():
            continue
        instruction, rest = step.split(None, 1)
        if instruction == "FROM":
            base, _, name = rest.split()
            stage = found[name] = Stage(base)
        elif stage is not None:
            stage.steps.append((instruction, rest.strip()))
    return found


class Execution:
    """The execution of a stage and of the stages that it is based on, below ``root``, with the files of ``context``."""

    def __init__(self, definition: str, root: Path, context: Path, arguments: dict[str, str]) -> None:
        self._stages = stages(definition)
        self._root = root
        self._context = context
        self._directory = root
        kept = re.compile("PATH|HOME|PIP_.*|BASCULE_MAVEN_REPOSITORY|SSL_CERT_.*|https?_proxy|no_proxy", re.IGNORECASE)
        self._environ = {
            "LANG": "C.UTF-8",
            "PIP_NO_COMPILE": "1",
            **{name: value for name, value in os.environ.items() if kept.fullmatch(name)},
        }
        self._arguments = arguments

    def run(self, stage: str) -> None:
        """Execute the steps. Raises CalledProcessError."""
        if self._stages[stage].base in self._stages:
            self.run(self._stages[stage].base)
        for instruction, rest in self._stages[stage].steps:
            match instruction:
                case "WORKDIR":
                    self._directory = Path(self._below(rest))
                    self._directory.mkdir(parents=True, exist_ok=True)
                case "ARG":
                    name, _, default = rest.partition("=")
                    self._environ[name] = self._arguments.get(name, default)
                case "ENV":
                    name, _, value = rest.partition("=")
                    self._environ[name] = self._below(value)
                case "COPY":
                    self._copy(rest.split())
                case "RUN" if not rest.startswith(OF_THE_SYSTEM):
                    subprocess.run(["/bin/sh", "-euc", self._below(rest)], cwd=self._directory, env=self._environ, check=True)
                case "RUN" | "SHELL":
                    pass
                case _:
                    raise NotImplementedError(f"{instruction} in stage {stage}")

    def _copy(self, names: list[str]) -> None:
        *sources, target = names
        for name in sources:
            source, to = self._context / name, self._directory / target
            if source.is_dir():
                shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                to = to / source.name if target.endswith("/") else to
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)

    def _below(self, text: str) -> str:
        return OWN_PATHS.sub(rf"{self._root}/\1", text).replace("--no-cache-dir", "")
