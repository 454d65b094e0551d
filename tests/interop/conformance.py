"""The cases of java/conformance, as their sources name them."""

from __future__ import annotations

import re

from tests.support.java import sources_of

PROGRAM = "Conformance"
#: The line that adds a case has its id as first argument.
_CASE = re.compile(r'^\s+\w+\("([a-z0-9-]+\.[a-z0-9-]+)",', re.MULTILINE)


def case_ids() -> list[str]:
    """Return the ids of all cases."""
    return [case for source in sources_of(PROGRAM) for case in _CASE.findall(source.read_text())]
