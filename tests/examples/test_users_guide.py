"""The commands of the guide about users."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.pages import ROOT, blocks, missing
from tests.examples.test_docs import Reader

GUIDE = ROOT / "docs" / "guides" / "users.md"


@pytest.mark.services
@pytest.mark.timeout(600)
def test_commands_of_the_users_guide_print_the_output_shown(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    found = blocks(GUIDE)
    shown = [block for block in found if block.purpose == "shows"]
    assert shown
    (serve,) = (number for number, block in enumerate(found) if block.purpose == "serve")
    (config,) = blocks(GUIDE, "config")
    (tmp_path / "bascule.toml").write_text(config.text)
    output = ""

    def read(part: slice) -> None:
        nonlocal output
        for block in found[part]:
            if block.purpose == "run":
                output = reader.run(block)
            elif block.purpose == "shows":
                line = missing(block.text, output)
                assert line is None, f"line {block.line}: not shown: {line}\n{output}{reader.logs()}"

    read(slice(serve))
    with reader.serving(found[serve]):
        read(slice(serve, None))
