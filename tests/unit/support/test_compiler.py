"""Why a machine cannot compile the modules."""

from __future__ import annotations

import pytest

from tests.support.compiler import obstacle


@pytest.mark.parametrize(
    ("compiler", "said"), [("no-such-compiler -x", "no-such-compiler: No such file or directory"), ("false", "false ended with 1: ")]
)
def test_obstacle_names_the_compiler_and_its_error(monkeypatch: pytest.MonkeyPatch, compiler: str, said: str) -> None:
    monkeypatch.setenv("CC", compiler)
    assert obstacle() == said


def test_compiler_without_error_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "true")
    assert obstacle() == ""
