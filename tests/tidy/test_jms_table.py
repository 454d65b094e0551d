"""docs/jms.md names existing tests and cases, for sections that the specification has."""

from __future__ import annotations

import re

import pytest

from tests.examples.pages import ROOT
from tests.interop.conformance import case_ids
from tests.tidy.test_docs import functions

PAGE = ROOT / "docs" / "jms.md"
#: The chapters of Jakarta Messaging 3.1 about providers, and their numbers of sections.
SECTIONS = {2: 16, 3: 12, 4: 2, 5: 3, 6: 2, 7: 10, 8: 8, 9: 2, 10: 3, 11: 4, 12: 4, 13: 1}
_NAMES = re.compile(r"`([a-z0-9-]+\.[a-z0-9-]+)`")
_TESTS = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> dict[str, list[str]]:
    """Return the cells of the tables by section."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if match := re.match(r"\| (\d[\d., to]*) \|(.*)\|$", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def test_conformance_cases_named_in_the_jms_table_exist() -> None:
    named = set(_NAMES.findall(PAGE.read_text()))
    assert len(named) > 300
    assert sorted(named - set(case_ids())) == []


def test_tests_named_in_the_jms_table_exist() -> None:
    named = _TESTS.findall(PAGE.read_text())
    assert named
    assert [f"{file}::{test}" for file, test in named if test not in functions(ROOT / "tests" / file)] == []


@pytest.mark.parametrize("section", rows())
def test_each_statement_of_the_jms_table_has_a_section_and_a_test_or_reason(section: str) -> None:
    numbers = re.findall(r"\d+(?:\.\d+)*", section)
    assert numbers
    for each in numbers:
        chapter, _, rest = each.partition(".")
        assert 0 < int(rest.partition(".")[0] or 1) <= SECTIONS[int(chapter)], each
    for cells in rows()[section]:
        _, kept_by = cells.split("|", 1)
        reason = re.sub(r"`[^`]*`|[\s.,:;]", "", kept_by)
        assert _NAMES.search(kept_by) or _TESTS.search(kept_by) or reason, section
