"""The rules of this repository that a machine can check."""

import ast
import re
import subprocess
from pathlib import Path

from tests.support.statements import statements

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "bascule"
MODULES = sorted(SOURCE.rglob("*.py"))
ALL_MODULES = sorted(path for place in ("src", "tests", "bench", "demo", "examples") for path in (ROOT / place).rglob("*.py"))
FILE_LINES_MAX = 500
#: A function fits on a screen.
FUNCTION_LINES_MAX = 60
#: A larger file is data or the output of a build, which belong elsewhere.
FILE_BYTES_MAX = 512 << 10
SOURCE_SUFFIXES = frozenset({".css", ".html", ".java", ".js", ".mjs", ".py", ".sh"})
TEXT_SUFFIXES = frozenset({".cfg", ".java", ".json", ".lock", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""})


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_source_file_exceeds_the_line_limit() -> None:
    lines = {named(path): len(path.read_text().splitlines()) for path in tracked() if path.suffix in SOURCE_SUFFIXES}
    assert lines
    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def long_functions(path: Path) -> dict[str, int]:
    """Return functions and their lines. A test may be longer: a scenario tells one story."""
    source = path.read_bytes()
    if source.count(b"\n") < FUNCTION_LINES_MAX:
        return {}
    functions = [node for node in statements(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        node.name: lines
        for node in functions
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX and not node.name.startswith("test_")
    }


def test_no_function_exceeds_the_line_limit() -> None:
    assert {named(path): long for path in ALL_MODULES if (long := long_functions(path))} == {}


def asserting_lines(path: Path) -> list[int]:
    source = path.read_bytes()
    tree = ast.parse(source if b"assert" in source else b"")  # to parse all modules takes seconds
    return [node.lineno for node in statements(tree) if isinstance(node, ast.Assert)]


def test_product_has_no_assert_statement() -> None:
    """An assert ends a thread with an error without text, and is removed by ``python -O``: raise an error of bascule.core.errors."""
    assert {named(path): lines for path in MODULES if (lines := asserting_lines(path))} == {}


def test_no_module_has_a_generic_name() -> None:
    assert [named(path) for path in MODULES if re.fullmatch(r"_?(utils?|helpers?|misc|common)", path.stem)] == []


def test_texts_end_with_a_newline_and_have_no_odd_characters() -> None:
    texts = [path for path in tracked() if path.suffix in TEXT_SUFFIXES]
    odd = [named(path) for path in texts if (text := path.read_text()) and (not text.endswith("\n") or "\r" in text or "\t\n" in text)]
    assert odd == []


def test_no_large_file_is_tracked() -> None:
    assert [named(path) for path in tracked() if path.stat().st_size > FILE_BYTES_MAX] == []


def test_no_text_refers_to_files_outside_the_repository() -> None:
    outside = re.compile(r"\bshared/(design|anchors|seeds)")
    ours = [path for path in tracked() if path.suffix in TEXT_SUFFIXES and path != Path(__file__)]
    assert [named(path) for path in ours if outside.search(path.read_text())] == []


def test_links_to_files_in_the_documentation_resolve() -> None:
    broken = []
    for page in (path for path in tracked() if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{named(page)}: {target}")
    assert broken == []


def class_names() -> dict[str, list[str]]:
    """Return the public class names of the product, each with the modules that define a class of this name."""
    homes: dict[str, list[str]] = {}
    for path in (ROOT / "src" / "bascule").rglob("*.py"):
        for node in statements(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return homes


def test_class_name_occurs_once_in_the_product() -> None:
    assert {name: paths for name, paths in class_names().items() if len(paths) > 1} == {}
