"""The documentation site changes the pages of the repository only where a reader of the site needs it."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.examples.pages import ROOT


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / ".ci" / "site" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = _load()


@pytest.mark.parametrize(
    ("page", "link", "in_site"),
    [
        ("docs/start.md", "guides/diverts.md#read-the-topics", "guides/diverts.md#read-the-topics"),
        ("docs/start.md", "../examples/Hello.java", "repository/examples/Hello.java.md"),
        ("docs/guides/xa-java.md", "../../examples/spring/Shop.java", "../repository/examples/spring/Shop.java.md"),
        ("docs/guarantees.md", "../bench/README.md#an-hour", "repository/bench/README.md#an-hour"),
        ("CHANGELOG.md", "docs/jms.md", "../jms.md"),
        ("CONTRIBUTING.md", "LICENSE", "LICENSE.md"),
        ("bench/README.md", "../docs/guarantees.md", "../../guarantees.md"),
        ("docs/start.md", "https://semver.org/", "https://semver.org/"),
        ("docs/start.md", "#set-up", "#set-up"),
    ],
)
def test_link_leads_to_the_page_of_the_site(page: str, link: str, in_site: str) -> None:
    assert site.for_site(page, f"See [there]({link}).") == f"See [there]({in_site})."


def test_link_in_a_fenced_block_is_not_changed() -> None:
    text = "```text\n[there](../examples/Hello.java)\n```\n"
    assert site.for_site("docs/start.md", text) == text


def test_directives_for_tests_are_removed_from_a_fenced_block() -> None:
    assert site.for_site("docs/start.md", "```toml same as examples/bascule.toml\nx = 1\n```\n") == "```toml\nx = 1\n```\n"


def test_escaped_bar_in_code_is_unescaped() -> None:
    assert site.for_site("docs/jms.md", "| `NAME\\|global` |") == "| `NAME|global` |"


@pytest.mark.parametrize("path", ["docs/start.md", "CHANGELOG.md", "LICENSE", "examples/Hello.java", "bench/README.md"])
def test_page_of_the_site_shows_the_file_of_the_repository(path: str) -> None:
    assert site.in_repository(site.in_site(path)) == path


def test_linked_file_outside_the_pages_gets_a_page() -> None:
    found = site.outside({"docs/start.md": "[Hello](../examples/Hello.java), [diverts](guides/diverts.md)"})
    assert (ROOT / "examples" / "Hello.java").read_text() in found["examples/Hello.java"]
    assert set(site.ALSO) <= set(found)
    assert not any(path.startswith("docs/") for path in found)
