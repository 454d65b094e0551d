"""Whether this machine can compile the modules: ``python -m tests.support.compiler`` exits with 1 and says why if it cannot."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

#: Characters of the compiler's output that the message contains.
SHOWN_CHARACTERS_MAX = 200


def obstacle() -> str:
    """Return why Python modules cannot be compiled; an empty text if they can."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")  # as setuptools chooses it
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.c")
        source.write_text("#include <Python.h>\n")
        command += ["-I", sysconfig.get_path("include"), "-c", str(source), "-o", str(source.with_suffix(".o"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
    return "" if done.returncode == 0 else f"{command[0]} ended with {done.returncode}: {done.stderr.strip():.{SHOWN_CHARACTERS_MAX}}"


if __name__ == "__main__":
    if why := obstacle():
        sys.exit(f"cannot compile the modules: {why}. They need a C compiler and the header files of Python (Debian: gcc, python3-dev)")
