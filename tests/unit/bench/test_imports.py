"""Benchmarks run rarely: a change of a module that they share must not break one of them unnoticed."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import bench


@pytest.mark.parametrize("name", sorted(module.name for module in pkgutil.iter_modules(list(bench.__path__))))
def test_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"bench.{name}")
