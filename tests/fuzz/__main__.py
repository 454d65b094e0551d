"""``python -m tests.fuzz``: fuzz harnesses, one after the other, and check their findings. The exit code is 0 without findings.

``--replay HARNESS FILE`` checks one input again; it needs no atheris.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.fuzz.harnesses import HARNESSES, INPUT_BYTES_MAX, Costly, judged, seeds
from tests.support.costs import LEFT_BYTES_MAX, Leftovers, quiet

MEMORY_MIB_MAX: Final = 2048
#: An input that takes longer is a finding, whatever else it does.
HANG_S: Final = 20
#: The start of the file name that libFuzzer gives to an input that ended it. An input that was slow only by the clock has another name.
ENDS: Final = ("crash-", "leak-", "oom-", "timeout-")
#: How often an expensive input is checked again.
ATTEMPTS: Final = 3
#: Number of inputs that are checked for memory that they leave behind.
LEFT_INPUTS_MAX: Final = 500


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("harness", nargs="*", choices=[*HARNESSES, []], help=f"one of {', '.join(HARNESSES)} (default: all)")
    parser.add_argument("--seconds", type=int, default=300, help="duration for each harness (default: %(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path("artifacts", "fuzz"), help="directory of inputs and findings (default: %(default)s)"
    )
    parser.add_argument("--replay", nargs=2, metavar=("HARNESS", "FILE"), help="check one input")
    options = parser.parse_args()
    if options.replay:
        name, file = options.replay
        replay(name, Path(file).read_bytes())
        say("no finding")
        return 0
    found = [finding for name in options.harness or HARNESSES for finding in fuzz(name, options.directory / name, options.seconds)]
    for finding in found:
        say(finding)
    return 1 if found else 0


def say(text: str) -> None:
    """Print a line with the time on standard output."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def fuzz(name: str, directory: Path, seconds: int) -> list[str]:
    """Fuzz one harness for a time, or until there is a finding. Return the finding."""
    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    until_s = time.monotonic() + seconds
    while (left_s := int(until_s - time.monotonic())) > 0:
        suspect = _guided(name, directory, left_s)
        if suspect is None:
            break
        try:
            replay(name, suspect.read_bytes())
        except Exception as error:
            return [f"{name}: {error!r:.500}; input: {suspect}"]
        suspect.unlink()  # slow because of the instrumentation, or of the machine
    inputs = sorted(corpus.iterdir())
    say(f"{name}: {len(inputs)} inputs that reach different code")
    return left_behind(name, [file.read_bytes() for file in inputs[:LEFT_INPUTS_MAX]])


def _guided(name: str, directory: Path, seconds: int) -> Path | None:
    """Fuzz in another process. Return the input at which the process ended, if there is one. Raises RuntimeError."""
    limits = {"max_total_time": seconds, "max_len": INPUT_BYTES_MAX, "rss_limit_mb": MEMORY_MIB_MAX, "timeout": HANG_S}
    said = [f"-{option}={value}" for option, value in limits.items()]
    prefix = f"-artifact_prefix={directory}/"
    with (directory / "log").open("ab") as log:
        command = [sys.executable, "-m", "tests.fuzz.guided", name, str(directory / "corpus"), prefix, *said]
        ended = subprocess.run(command, stdout=log, stderr=log, check=False)
    if ended.returncode == 0:
        return None
    suspects = sorted((file for file in directory.iterdir() if file.name.startswith(ENDS)), key=lambda file: file.stat().st_mtime)
    if not suspects:
        raise RuntimeError(f"the fuzzer has ended with {ended.returncode} and no input; its log is {directory / 'log'}")
    return suspects[-1]


def replay(name: str, data: bytes) -> None:
    """Check an input without instrumentation. Raises the harness's error; Costly only if the input is expensive each time."""
    cost: Costly | None = None
    for _ in range(ATTEMPTS):
        with quiet(), HARNESSES[name]() as harness:
            try:
                judged(harness, data)
            except Costly as error:
                cost = error
            else:
                return
    if cost is not None:
        raise cost


def left_behind(name: str, inputs: list[bytes]) -> list[str]:
    """Check what inputs leave in memory when they are repeated. Return the finding."""
    with HARNESSES[name]() as harness:
        leftovers = Leftovers(harness.journal)
        for _ in leftovers.passes():
            for data in inputs:
                harness.feed(data)
    size_bytes = leftovers.size_bytes
    return [f"{name}: {size_bytes} bytes of memory leaked by {len(inputs)} inputs"] if size_bytes > LEFT_BYTES_MAX else []


if __name__ == "__main__":
    sys.exit(main())
