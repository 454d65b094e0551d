"""Crash points in the process of a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bascule.core import crash


def at_crash_points(patched: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call ``act`` with the name of each crash point that this process passes, in the state that the table of the points describes."""

    def point(name: str, bring_about: Callable[[], object] | None = None) -> None:
        if bring_about is not None:
            bring_about()
        act(name)

    patched.setattr(crash, "point", point)
