"""``bascule config import`` never gives more permissions than Artemis without a row that says so."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from bascule.cli.imports.importer import ImportOptions, import_sources
from bascule.cli.imports.report import ImportOutcome, ImportRow
from bascule.config.load import settings_of_text
from bascule.core.errors import InvalidInput

SEND = '<permission type="send" roles="sales"/>'


def imported(directory: Path, core: str) -> tuple[dict[str, Any], list[ImportRow]]:
    """Return the written settings and the rows of the report."""
    path = directory / "broker.xml"
    path.write_text(f"<configuration><core>\n{core}\n</core></configuration>")
    result = import_sources(ImportOptions([path], directory / "bascule.toml"))
    settings_of_text(result.text, "bascule.toml")
    return tomllib.loads(result.text), list(result.report.rows)


def security(*settings: str) -> str:
    return f"<security-settings>{''.join(settings)}</security-settings>"


def setting(match: str, permissions: str = SEND) -> str:
    return f'<security-setting match="{match}">{permissions}</security-setting>\n'


@pytest.mark.parametrize(
    "core",
    [
        "",
        "<security-enabled>true</security-enabled>",
        security(),
        security(setting("activemq.management.#", '<permission type="manage" roles="amq"/>')),
        security(setting("or*ders")),
    ],
)
def test_source_without_a_permission_denies_everything(core: str, tmp_path: Path) -> None:
    tree, rows = imported(tmp_path, core)
    assert tree["permission"] == [{"match": "#"}]
    (row,) = [row for row in rows if row.setting == '[[permission]] match = "#"']
    assert (row.outcome, "denies everything" in row.note) == (ImportOutcome.DIFFERS, True)


def test_disabled_security_allows_everything(tmp_path: Path) -> None:
    tree, rows = imported(tmp_path, f"<security-enabled>false</security-enabled>{security(setting('#'))}")
    assert ("permission" in tree, tree["broker"]["allow_anonymous"]) == (False, True)
    assert any("every client may do everything" in row.note for row in rows)


def test_permission_on_one_queue_of_an_address_is_not_taken_for_an_address(tmp_path: Path) -> None:
    tree, rows = imported(tmp_path, security(setting("orders::audit"), setting("orders")))
    assert [each["match"] for each in tree["permission"]] == ["orders"]
    assert any("one queue of an address" in row.note and "may allow more" in row.note for row in rows if row.outcome is ImportOutcome.NONE)


def test_marks_of_a_literal_match_count_for_addresses_only(tmp_path: Path) -> None:
    core = "<literal-match-markers>()</literal-match-markers>" + security(setting("(orders)"))
    settings = '<address-setting match="(orders)"><max-delivery-attempts>3</max-delivery-attempts></address-setting>'
    tree, _ = imported(tmp_path, f"{core}<address-settings>{settings}</address-settings>")
    assert (tree["permission"][0]["match"], tree["address"][0]["match"]) == ("(orders)", "orders")


def test_permission_of_bascule_alone_is_not_taken(tmp_path: Path) -> None:
    tree, rows = imported(tmp_path, security(setting("#", '<permission type="recover" roles="sales"/>')))
    assert tree["permission"] == [{"match": "#"}]
    assert any("unknown permission" in row.note for row in rows)


@pytest.mark.parametrize("match", ["mops.#", "mops.queue.orders.*"])
def test_permission_on_operations_of_the_management_is_not_one_on_addresses(match: str, tmp_path: Path) -> None:
    tree, _ = imported(tmp_path, security(setting(match, '<permission type="view" roles="sales"/>'), setting("a")))
    assert [each["match"] for each in tree["permission"]] == ["a"]


def test_several_elements_for_one_permission_add_up(tmp_path: Path) -> None:
    tree, _ = imported(tmp_path, security(setting("a", SEND + '<permission type="send" roles="audit, sales"/>')))
    assert tree["permission"] == [{"match": "a", "send": ["sales", "audit"]}]


def test_role_mapping_applies_to_roles_that_artemis_finds(tmp_path: Path) -> None:
    """Artemis looks for the mapping of " audit", with its blank."""
    mappings = '<role-mapping from="cn=a" to="sales, audit"/><role-mapping from="" to="sales"/>'
    tree, rows = imported(tmp_path, security(mappings, setting("a", '<permission type="send" roles="sales, audit"/>')))
    assert tree["permission"] == [{"match": "a", "send": ["sales", "cn=a", "audit"]}]
    assert any("no role-mapping for audit" in row.note for row in rows)


@pytest.mark.parametrize("role", ["*", "a" * 1000, "\N{LATIN SMALL LIGATURE FI}nance"])
def test_role_that_cannot_have_this_name_gets_nothing(role: str, tmp_path: Path) -> None:
    permissions = f'<permission type="send" roles="{role}"/><permission type="consume" roles="sales"/>'
    tree, rows = imported(tmp_path, security(setting("a", permissions)))
    assert tree["permission"] == [{"match": "a", "consume": ["sales"]}]
    assert [row.outcome for row in rows if 'permission["send"]@roles' in row.element] == [ImportOutcome.NONE]


@pytest.mark.parametrize(
    ("matches", "preferred"),
    [
        (("orders.#", "orders.*.dead.#"), "orders.*.dead.#"),  # Artemis: the longer text
        (("orders.*.dead.#", "orders.#"), "orders.*.dead.#"),
        (("*.b.c", "a.*.*"), "a.*.*"),  # Artemis: the first word that is no wildcard
        (("a.*", "*.b"), None),  # both: the first word that is no wildcard
        (("*.b", "a.*"), None),
        (("#", "orders.#"), None),
        (("orders.#", "orders.*"), None),
        (("orders.#", "orders.eu"), None),
        (("a.#", "b.*.long.#"), None),  # no address matches both
        (("a.*.c", "a.b.*.d"), None),
    ],
)
def test_match_that_artemis_prefers_and_bascule_does_not_is_reported(
    matches: tuple[str, str], preferred: str | None, tmp_path: Path
) -> None:
    _, rows = imported(tmp_path, security(*map(setting, matches)))
    found = [row for row in rows if "Artemis prefers this match" in row.note]
    assert [row.value for row in found] == ([preferred] if preferred else [])
    assert all("may allow more" in row.note for row in found)


def test_precedence_of_very_many_matches_is_said_to_be_unchecked(tmp_path: Path) -> None:
    _, rows = imported(tmp_path, security(*(setting(f"a{number}.#") for number in range(1001))))
    assert [row.outcome for row in rows if "not checked whether" in row.note] == [ImportOutcome.DIFFERS]


def test_mappings_cannot_multiply_roles_without_limit(tmp_path: Path) -> None:
    mappings = "".join(f'<role-mapping from="r{number}" to="sales"/>' for number in range(1000))
    with pytest.raises(InvalidInput, match=r"broker.xml:\d+: permissions name roles more than 100,000 times"):
        imported(tmp_path, security(mappings, *(setting(f"a{number}") for number in range(101))))


def test_later_limits_of_a_user_replace_earlier_ones(tmp_path: Path) -> None:
    limits = "".join(f'<resource-limit-setting match="ann"><max-connections>{n}</max-connections></resource-limit-setting>' for n in (9, 3))
    tree, _ = imported(tmp_path, f"<resource-limit-settings>{limits}</resource-limit-settings>")
    assert tree["limit"] == [{"users": ["ann"], "max_connections": 3}]
