"""Unclear phrases do not return to the product and its documentation; ``docs/style.md`` has the replacements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.pages import pages

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "bascule"
PHRASES = re.compile(
    r"comes? again\b|sent ahead|stands? still|\bof before\b|in any of which|what there is to|passed over\b|"
    r"a hand on\b|this Bascule reads|\banew\b",
    re.IGNORECASE,
)
#: The style guide quotes phrases, beside their replacements.
QUOTING = "style.md"


def without_test_names(text: str) -> str:
    """Return a page without the names of tests that it cites."""
    return re.sub(r"::test_\w+", "", text)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_module_has_none_of_the_phrases(path: Path) -> None:
    assert PHRASES.findall(path.read_text()) == []


@pytest.mark.parametrize("page", [page for page in pages() if page.name != QUOTING], ids=lambda page: page.name)
def test_page_has_none_of_the_phrases(page: Path) -> None:
    assert PHRASES.findall(without_test_names(page.read_text())) == []


def test_phrase_is_found() -> None:
    assert PHRASES.search("messages of the topic of before are still to be taken")
