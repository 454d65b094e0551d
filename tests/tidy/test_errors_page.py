"""docs/reference/errors.md has every public error class, with the answers of the class and an example that the code can raise."""

from __future__ import annotations

import re

import pytest

from tests.support.errors_page import PAGE, Entry, can_raise, entries, public_errors, with_answers

ENTRIES = entries(PAGE.read_text())
#: The text of this class is data with a checksum, and has no words.
WITHOUT_WORDS = {"CarriedError"}


def test_error_page_has_each_public_error_class_once() -> None:
    headings = re.findall(r"^### `(\w+)`$", PAGE.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(public_errors())
    assert [each.name for each in ENTRIES] == headings, "an entry has a meaning, what to do, an example and the answers"


def test_error_page_has_the_attributes_of_each_class() -> None:
    page = PAGE.read_text()
    assert page == with_answers(page), "run python -m tests.support.errors_page, and look at the difference"


def test_wrong_attributes_on_the_error_page_are_found() -> None:
    page = PAGE.read_text()
    wrong = page.replace("Retriable: yes", "Retriable: no", 1)
    assert wrong != page
    assert with_answers(wrong) == page


@pytest.mark.parametrize("entry", [each for each in ENTRIES if each.name not in WITHOUT_WORDS], ids=lambda each: each.name)
def test_example_message_of_each_error_can_be_raised_by_the_code(entry: Entry) -> None:
    assert can_raise(entry.name, entry.example)


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("QueueFull", "queue orders is overfull: 1000 messages, 52000 bytes"),
        ("QueueFull", "queue orders has been deleted"),
        ("SecurityDenied", "the password is not the right one"),
        ("TopicMissing", "topic 'flights' is absent and is not created"),
        ("LoopGone", "the event loop of the coroutine was closed without a reason"),
    ],
)
def test_example_message_that_the_code_cannot_raise_is_found(name: str, example: str) -> None:
    assert not can_raise(name, example)
