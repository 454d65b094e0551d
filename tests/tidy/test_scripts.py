"""The JavaScript of the console and of its tests."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "src" / "bascule" / "server" / "console_files"
SCRIPTS = sorted((*CONSOLE.glob("*.js"), *(ROOT / "tests" / "console").glob("*.mjs")))
#: A script of the console is about one page.
SCRIPT_LINES_MAX = 150
LINE_LENGTH_MAX = 180


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_a_valid_module(path: Path, tmp_path: Path) -> None:
    assert shutil.which("node") is not None, "Node.js checks the scripts of the console"
    module = tmp_path / f"{path.stem}.mjs"  # with the suffix .js, it would not be read as a module
    shutil.copy(path, module)
    done = subprocess.run(["node", "--check", module], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_short_and_begins_with_its_purpose(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    assert max(map(len, lines)) <= LINE_LENGTH_MAX
    assert path.suffix == ".mjs" or len(lines) <= SCRIPT_LINES_MAX


def test_every_page_is_in_the_navigation_or_hidden() -> None:
    app = (CONSOLE / "app.js").read_text()
    assert [path.name for path in CONSOLE.glob("page-*.js") if f'"./{path.name}"' not in app] == []
