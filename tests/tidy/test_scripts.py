"""The JavaScript of the console and of its tests."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "src" / "bascule" / "server" / "console_files"
SCRIPTS = sorted((*CONSOLE.glob("*.js"), *(ROOT / "tests" / "console").glob("*.mjs")))
#: A script of the console is about one page.
SCRIPT_LINES_MAX = 150
LINE_LENGTH_MAX = 180
#: Compiles each script as a module without running it, and prints the errors by path.
COMPILE_ALL = """
import { readFileSync } from "node:fs";
import { SourceTextModule } from "node:vm";
const errors = {};
for (const path of process.argv.slice(1)) {
  try {
    new SourceTextModule(readFileSync(path, "utf8"), { identifier: path });
  } catch (error) {
    errors[path] = error.stack;
  }
}
console.log(JSON.stringify(errors));
"""


@cache
def errors(paths: tuple[Path, ...]) -> dict[str, str]:
    """Return the syntax errors of scripts, by path. One process compiles all: the start of Node.js takes longer than a script."""
    assert shutil.which("node") is not None, "Node.js checks the scripts of the console"
    node = ["node", "--experimental-vm-modules", "--no-warnings", "--input-type=module", "--eval", COMPILE_ALL, "--", *map(str, paths)]
    done = subprocess.run(node, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_a_valid_module(path: Path) -> None:
    assert errors(tuple(SCRIPTS)).get(str(path)) is None


def test_invalid_script_is_found(tmp_path: Path) -> None:
    valid, invalid = tmp_path / "valid.js", tmp_path / "invalid.js"
    valid.write_text("import { missing } from './missing.js';\nexport const one = await missing();\n")
    invalid.write_text("export const one = ;\n")
    assert {path: error.splitlines()[0] for path, error in errors((valid, invalid)).items()} == {
        str(invalid): "SyntaxError: Unexpected token ';'"
    }


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_short_and_begins_with_its_purpose(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    assert max(map(len, lines)) <= LINE_LENGTH_MAX
    assert path.suffix == ".mjs" or len(lines) <= SCRIPT_LINES_MAX


def test_every_page_is_in_the_navigation_or_hidden() -> None:
    app = (CONSOLE / "app.js").read_text()
    assert [path.name for path in CONSOLE.glob("page-*.js") if f'"./{path.name}"' not in app] == []
