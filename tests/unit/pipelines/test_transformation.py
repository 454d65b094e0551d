"""What is said of a user's function that cannot be used. No Spark: none of these comes so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bascule.core.errors import InvalidInput
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.transformation import transformed

MODULE = """
def by_key(messages):
    return {}["colour"]

def by_type(messages):
    return messages + 1

def nothing(messages):
    return None
"""


@pytest.mark.parametrize(
    ("module", "function", "said"),
    [
        ("users_own", "by_key", "users_own:by_key failed when it was planned: KeyError: 'colour'"),
        ("users_own", "by_type", "users_own:by_type failed when it was planned: TypeError: "),
        ("users_own", "nothing", "users_own:nothing returned NoneType, not a DataFrame"),
        ("users_own", "missing", "python = 'users_own:missing' cannot be loaded: AttributeError: "),
        ("users_broken", "by_key", "python = 'users_broken:by_key' cannot be loaded: ZeroDivisionError: "),
        ("users_unwritten", "by_key", "python = 'users_unwritten:by_key' cannot be loaded: ModuleNotFoundError: "),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_with_the_name_of_its_divert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, function: str, said: str
) -> None:
    (tmp_path / "users_own.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    messages: Any = object()
    with pytest.raises(InvalidInput) as refused:
        transformed(DivertSpec("d", "#", function=f"{module}:{function}"), messages)
    assert str(refused.value).startswith(f"divert 'd': {said}")
