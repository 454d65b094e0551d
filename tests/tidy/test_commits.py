"""Subjects of commits: imperative, at most 72 characters, no period at the end. Older history is not checked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Later commits are checked. A clone without this commit, such as a shallow one, has its last commit checked.
CHECKED_BEHIND = "3b1d7b2"
SUBJECT_MAX = 72
IMPERATIVES = frozenset({"Bring", "Embed", "Feed", "Focus", "Need", "Seed", "Shed", "Speed", "Spring"})


def faults(subject: str) -> list[str]:
    """Return what is wrong with the subject line of a commit."""
    first = subject.split(" ", 1)[0]
    found = []
    if len(subject) > SUBJECT_MAX:
        found.append(f"{len(subject)} characters; at most {SUBJECT_MAX}")
    if subject.endswith("."):
        found.append("ends with a period")
    if not first[:1].isupper():
        found.append("does not begin with a capital letter")
    if re.search("(ed|ing|[^s]s)$", first) and first not in IMPERATIVES:
        found.append(f"{first} is not imperative")
    return found


def subjects() -> list[str]:
    """Return the subjects to check; none if the sources are not a clone."""
    for commits in (f"{CHECKED_BEHIND}..HEAD", "-1"):
        done = subprocess.run(["git", "log", "--no-merges", "--format=%s", commits], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.splitlines()
    return []


def test_subjects_of_commits_are_short_imperative_lines() -> None:
    assert {subject: found for subject in subjects() if (found := faults(subject))} == {}


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Added a test", "Added is not imperative"),
        ("Adds a test", "Adds is not imperative"),
        ("Adding a test", "Adding is not imperative"),
        ("add a test", "does not begin with a capital letter"),
        ("Add a test.", "ends with a period"),
        ("Add " + "x" * 69, "73 characters; at most 72"),
    ],
)
def test_faulty_subject_is_reported(subject: str, fault: str) -> None:
    assert faults(subject) == [fault]


@pytest.mark.parametrize("subject", ["Add a test", "Embed the archive", "Pass the name", "Focus the page", "Bring " + "x" * 66])
def test_good_subject_has_no_fault(subject: str) -> None:
    assert faults(subject) == []
