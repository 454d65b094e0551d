"""No test passes without an assertion. A test that asserts only within loops shows no more than that its loops ran."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.statements import statements

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))
#: Functions whose result is not empty if their arguments are not.
PASSING_ON = frozenset({"enumerate", "items", "keys", "len", "product", "range", "reversed", "sorted", "values", "zip"})


def named(path: Path) -> str:
    return str(path.relative_to(TESTS))


def is_fixed(iterable: ast.expr) -> bool:
    """Return whether a loop over this is never empty: a range, a literal, or a result computed from constants of the module."""
    if isinstance(iterable, ast.List | ast.Tuple | ast.Set):
        return bool(iterable.elts)
    if isinstance(iterable, ast.GeneratorExp | ast.ListComp):
        return all(is_fixed(each.iter) for each in iterable.generators)
    called = [call.func for call in ast.walk(iterable) if isinstance(call, ast.Call)]
    names = {function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "") for function in called}
    if names and not names <= PASSING_ON:
        return False
    counts = {id(keyword.value) for node in ast.walk(iterable) if isinstance(node, ast.Call) for keyword in node.keywords}
    values = {node.id for node in ast.walk(iterable) if isinstance(node, ast.Name) and id(node) not in counts} - PASSING_ON
    return "range" in names or all(name.isupper() for name in values)


def asserts(body: Sequence[ast.stmt], sure: bool = True) -> Iterator[bool]:
    """Yield for each assertion below these statements whether it is reached if all loops are empty."""
    for statement in body:
        if isinstance(statement, ast.Assert):
            yield sure
        elif isinstance(statement, ast.For | ast.AsyncFor):
            yield from asserts(statement.body, sure and is_fixed(statement.iter))
        elif isinstance(statement, ast.With | ast.AsyncWith):
            if any("raises" in ast.unparse(item.context_expr) for item in statement.items):
                yield sure
            yield from asserts(statement.body, sure)
        elif isinstance(statement, ast.Try | ast.While | ast.If | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from asserts(getattr(statement, part, []), sure)


def passing_unseen(source: str) -> list[str]:
    """Yield the tests of a file that contain assertions, but run none if their loops are empty."""
    functions = [node for node in statements(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # Among the many examples that Hypothesis generates, some have non-empty loops.
    once = [node for node in functions if not any(ast.unparse(each).startswith("given(") for each in node.decorator_list)]
    tests = [(node.name, list(asserts(node.body))) for node in once if node.name.startswith("test_")]
    return [name for name, found in tests if found and not any(found)]


def test_every_test_asserts_something_outside_possibly_empty_loops() -> None:
    assert {named(path): tests for path in FILES if (tests := passing_unseen(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("loop", "unseen"),
    [
        ("for row in rows():", True),
        ("for row in ROWS:", False),
        ("for row in (1, 2):", False),
        ("for row in ():", True),
        ("for n, row in enumerate(ROWS.items()):", False),
        ("for row in of(ROWS):", True),
        ("for row in range(9):", False),
        ("for row in (each for each in range(9)):", False),
        ("for row in product(ROWS, repeat=count):", False),
        ("for row in given.rows:", True),
        ("if given:", False),
    ],
)
def test_an_assertion_in_a_loop_that_may_be_empty_is_found(loop: str, unseen: bool) -> None:
    source = f"def test_it(given):\n  {loop}\n    assert row"
    assert passing_unseen(source) == (["test_it"] if unseen else [])
    assert passing_unseen(f"{source}\n  assert given") == []
