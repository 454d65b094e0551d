"""Unclear phrases do not return to the product and its documentation; ``docs/style.md`` has the replacements."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_no_module_has_one_of_the_phrases() -> None:
    found = {str(path.relative_to(SOURCE)): PHRASES.findall(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}


def test_no_page_has_one_of_the_phrases() -> None:
    found = {str(page.relative_to(ROOT)): PHRASES.findall(without_test_names(page.read_text())) for page in pages() if page.name != QUOTING}
    assert {page: phrases for page, phrases in found.items() if phrases} == {}


def test_phrase_is_found() -> None:
    assert PHRASES.search("messages of the topic of before are still to be taken")
