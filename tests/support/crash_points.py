"""Crash points in the process of a test, where a function of the test takes the place of the signal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bascule.core import crash


def at_crash_points(patch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    """Call ``act`` with the name of each crash point that this process passes. ``act`` may raise an exception."""

    def point(name: str, bring_about: Callable[[], object] | None = None) -> None:
        act(name)

    patch.setattr(crash, "point", point)
