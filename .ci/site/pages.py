"""Hook of mkdocs that adds a page to the site for each file outside docs/ to which a page of docs/ links.

The pages are written for a reader of the repository: their links lead to files there, and the words behind the language of a fenced block
tell the tests what the block is for. This hook gives each linked file outside of docs/ a page below ``repository/`` in the site, and leads
the links there. So the site needs neither the repository nor the network.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[2]
#: Pages outside of docs/ that the navigation names.
ALSO = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")
LANGUAGES = {".java": "java", ".py": "python", ".toml": "toml"}
_FENCED = re.compile(r"^( *)(```+).*?^\1\2$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"`[^`\n]+`")
#: A script, style sheet, frame or picture that a browser would fetch from a server.
_FETCHED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?(?:https?:)?//[^>]*>|<link\b[^>]*stylesheet[^>]*\bhref=\"?(?:https?:)?//[^>]*>"
)


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to the text between fenced blocks."""
    parts, end = [], 0
    for block in _FENCED.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def linked(path: str, text: str) -> Iterator[str]:
    """Yield the files that the page at ``path`` links to, all paths relative to the repository."""
    for target, _ in _LINK.findall(_FENCED.sub("", text)):
        yield os.path.normpath(PurePosixPath(path).parent / target)


def in_site(path: str) -> str:
    """Return where the site's sources have the file of the repository at ``path``."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def in_repository(uri: str) -> str:
    """Return the file of the repository that the site's source ``uri`` shows."""
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def for_site(path: str, text: str) -> str:
    """Return the text of the page at ``path`` with the site's links, and without what only tests and code hosts read."""
    base = PurePosixPath(in_site(path)).parent

    def link(match: re.Match[str]) -> str:
        target = in_site(os.path.normpath(PurePosixPath(path).parent / match[1]))
        return f"]({os.path.relpath(target, base)}{match[2] or ''})"

    text = outside_fences(text, lambda prose: _LINK.sub(link, prose))
    # In a cell of a table, a code host reads \| as |, in code too.
    text = outside_fences(text, lambda prose: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), prose))
    return re.sub(r"^( *```\w+) [^\n]*$", r"\1", text, flags=re.MULTILINE)


def shown(path: str) -> str:
    """Return the page that shows a file outside of docs/. Raises OSError."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n~~~~{LANGUAGES.get(PurePosixPath(path).suffix, 'text')}\n{text}~~~~\n"


def outside(pages: dict[str, str]) -> dict[str, str]:
    """Return the pages for files outside of docs/ that the given pages, and these pages themselves, link to."""
    found: dict[str, str] = {}
    waiting = [*ALSO, *(target for path, text in pages.items() for target in linked(path, text))]
    while waiting:
        path = waiting.pop()
        if path not in found and not path.startswith("docs/") and (ROOT / path).is_file():
            found[path] = shown(path)
            if path.endswith(".md"):
                waiting += linked(path, found[path])
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside of docs/, Mermaid and the script for the search (an event of mkdocs)."""
    from mkdocs.structure.files import File, InclusionLevel

    from bascule.embedded.jars import classpath

    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path, text in outside(pages).items():
        files.append(File.generated(config, in_site(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    (mermaid,) = classpath("mermaid")
    with zipfile.ZipFile(mermaid) as jar:
        (script,) = (name for name in jar.namelist() if name.endswith("/dist/mermaid.min.js"))
        files.append(File.generated(config, "assets/mermaid.min.js", content=jar.read(script)))
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(Path(__file__).with_name("iframe-worker.js"))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give a page the site's links (an event of mkdocs)."""
    return for_site(in_repository(page.file.src_uri), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that a browser could not show without the network (an event of mkdocs)."""
    from mkdocs.exceptions import PluginError

    if fetched := _FETCHED.findall(output):
        raise PluginError(f"{page.file.src_uri} fetches from a server: {fetched}")
    return output
