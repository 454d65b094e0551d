"""One harness under atheris, in another process: ``python -m tests.fuzz.guided HARNESS CORPUS [options of libFuzzer]``.

The process ends at the first finding, or at an input so expensive that it must be checked without instrumentation.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

import atheris

with atheris.instrument_imports(include=["bascule"]):
    from tests.fuzz.harnesses import HARNESSES, judged

from tests.support.costs import COST_S_MAX

#: Instrumented code is slower by this factor. A still slower input is checked without instrumentation.
INSTRUMENTED: Final = 4
#: The journal of a harness grows; after this number of inputs, a new one is made.
INPUTS_OF_ONE_HARNESS: Final = 500


def main() -> None:
    """Fuzz until libFuzzer ends."""
    name = sys.argv.pop(1)
    made = HARNESSES[name]()
    state = [0, made, made.__enter__()]
    gc.disable()  # a garbage collection is not the cost of one input

    def take(data: bytes) -> None:
        state[0] += 1
        if state[0] % INPUTS_OF_ONE_HARNESS == 0:
            state[1].__exit__()
            state[1] = HARNESSES[name]()
            state[2] = state[1].__enter__()
            gc.collect()
        judged(state[2], data, COST_S_MAX * INSTRUMENTED)

    atheris.Setup(sys.argv, take)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
