"""The Java artifacts for transactions: Maven builds them, and runs their tests against a broker."""

from __future__ import annotations

from pathlib import Path

from tests.support.maven import XA_PROJECT, build
from tests.support.system import System

TESTS = XA_PROJECT / "bascule-xa-jakarta" / "src" / "test" / "java"


def test_jars_for_both_apis_pass_their_tests_with_a_broker(system: System, tmp_path: Path) -> None:
    tests = build(tmp_path, "package", **{"bascule.url": system.url, "test.excluded": ""})
    written = sum(file.read_text().count("@Test") for file in TESTS.rglob("*Test.java"))
    assert {module: (each.run, each.skipped) for module, each in tests.items()} == {
        "bascule-xa-jakarta": (written, 0), "bascule-xa-javax": (written, 0),
    }  # fmt: skip
    assert {module for module in tests if (tmp_path / module / f"{module}-0.1.0.jar").is_file()} == set(tests)
