"""One harness under atheris, in a process of its own: ``python -m tests.fuzz.guided HARNESS CORPUS [options of libFuzzer]``.

Ends at the first input that is a finding, or that costs so much that it has to be judged without instrumentation.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

import atheris

with atheris.instrument_imports(include=["bascule"]):
    from tests.fuzz.harnesses import HARNESSES, judged

from tests.support.costs import COST_S_MAX

#: Instrumented code takes so many times as long; what takes longer still is judged without.
INSTRUMENTED: Final = 4
#: The journal of a harness grows; after so many inputs there is a new one.
INPUTS_OF_ONE_HARNESS: Final = 500


def main() -> None:
    """Fuzz until libFuzzer ends."""
    name = sys.argv.pop(1)
    made = HARNESSES[name]()
    state = [0, made, made.__enter__()]
    gc.disable()  # a collection is no cost of one input

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
