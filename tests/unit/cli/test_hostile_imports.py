"""``bascule config import`` of hostile and broken files: one error with the line, in short time and little memory, and nothing written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bascule.cli.imports.importer import ImportOptions, import_sources
from bascule.cli.imports.substitution import FILE_BYTES_MAX
from bascule.cli.imports.xml_tree import DEPTH_MAX, ELEMENTS_MAX
from bascule.core.errors import InvalidInput
from tests.support.speed import SLOWNESS
from tests.unit.cli.conftest import Bascule

#: Expansion of the entities would take gigabytes.
LAUGHS = (
    '<?xml version="1.0"?>\n<!DOCTYPE lolz [\n<!ENTITY a "lol">\n'
    + "".join(f'<!ENTITY {name} "{f"&{before};" * 10}">\n' for before, name in zip("abcdefghi", "bcdefghij", strict=True))
    + "]>\n<configuration>&j;</configuration>"
)
EXTERNAL = '<!DOCTYPE c [<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<configuration>&x;</configuration>'
INCLUDE = '<configuration xmlns:xi="http://www.w3.org/2001/XInclude">\n<core>\n<xi:include href="addresses.xml"/>\n</core></configuration>'
#: An object that contains the object before it twice, thirty times.
DOUBLING = "bridge { id = a }\na0 { x = 1 }\n" + "".join(
    f"a{number} {{ l = ${{a{number - 1}}}, r = ${{a{number - 1}}} }}\n" for number in range(1, 31)
)
#: Texts that contain the text before them a thousand times.
TEXTS = f'bridge {{ id = a }}\na0 = "{"x" * 1_000_000}"\n' + "".join(f"a{n} = {f'${{a{n - 1}}}' * 1000}\n" for n in range(1, 4))
#: Each line continues the one before it.
CONTINUED = "bridge.id = a\nother = " + "aa\\\n" * 150_000
#: Objects 50 deep, each with a reference to the next one at its end.
CHAIN = "bridge { id = a }\na40 = 1\n" + "".join(f"a{n} = {'{ x = ' * 50}${{a{n + 1}}}{' }' * 50}\n" for n in range(40))


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("laughs.xml", LAUGHS, "laughs.xml:2: a document type (<!DOCTYPE>) and entities are not allowed"),
        ("external.xml", EXTERNAL, "external.xml:1: a document type"),
        ("include.xml", INCLUDE, "include.xml:3: <xi:include href='addresses.xml'> is not followed; import the output of `xmllint"),
        ("deep.xml", "<a>\n" * 100_000, f"deep.xml:{DEPTH_MAX + 1}: elements are nested more than 64 deep"),
        ("many.xml", f"<configuration>{'<a/>' * (ELEMENTS_MAX + 1)}</configuration>", "many.xml:1: the file has more than 100,000"),
        ("text.xml", f"<configuration>{'a' * 2_000_000}</configuration>", "text.xml:1: the elements have more than 1,048,576 char"),
        ("huge.xml", "<a>" + " " * FILE_BYTES_MAX, "huge.xml: larger than 8 MiB"),
        ("broken.xml", "<configuration>\n<core>\n</configuration>", "broken.xml:3: not well-formed XML: mismatched tag"),
        ("empty.xml", "", "empty.xml:1: not well-formed XML: no element found"),
        ("no.xml", "bridge { }", "no.xml:1: not well-formed XML: syntax error"),
        ("unknown.xml", '<?xml version="1.0" encoding="klingon"?><a/>', "unknown.xml"),
        ("multi.xml", '<?xml version="1.0" encoding="gb18030"?><a/>', "multi.xml"),
        ("latin.xml", b"<configuration>\n\xe9</configuration>", "latin.xml:2: not well-formed XML: not well-formed (invalid token)"),
        ("latin.conf", b"bridge {\n id = \xe9 }", "latin.conf:2: not UTF-8 (byte 15)"),
        ("deep.conf", "a = " + "[" * 100_000, "deep.conf:1: values are nested more than 64 deep"),
        ("objects.conf", "a {" * 100_000, "objects.conf:1: values are nested more than 64 deep"),
        ("cycle.conf", "bridge { id = a }\na = ${b}\nb = ${a}", "cycle.conf:2: the reference ${b} leads to itself"),
        ("doubling.conf", DOUBLING, "values"),
        ("entries.properties", "bridge.id = a\n" + "a\n" * 50_000, "entries.properties:50001: the file has more than 50,000 entries"),
        ("texts.conf", TEXTS, "texts.conf:3: the references make more than 16 Mi characters"),
        ("chain.conf", CHAIN, "values and references are nested more than 128 deep"),
        ("append.conf", "bridge { id = a }\n" + "b += 1\n" * 30_000, "the file has more than 20,000 values"),
        ("dots.conf", "bridge { id = a }\n" + "b." * 200_000 + "c = 1", "dots.conf:2: a key has more than 64 parts"),
        ("long.conf", "bridge { id = a }\n" + "b" * 1_000_000 + " = 1", "long.conf:2: a key has more than 64 parts, or a part with more"),
        ("words.conf", "bridge { id = a }\n" + "b" * 1_000_000 + " 1 }", "words.conf:2: "),
        ("attributes.xml", "<configuration>" + "<a b='' c='' d=''/>" * 70_000 + "</configuration>", "more than 200,000 attributes"),
        ("href.xml", INCLUDE.replace("addresses", "b" * 1_000_000), "is not followed"),
        ("names.xml", "<configuration>${" + "b" * 500_000 + "}</configuration>", "has no value; give it with --property"),
        ("include.conf", 'bridge {\n include "more.conf"\n}', "include.conf:2: include is not followed"),
        ("open.conf", "bridge {\n id = a", "open.conf:2: the object that begins in line 1 has no end"),
        ("list.conf", "bridge {\n id = [a", "list.conf:2: the list that begins in line 2 has no end"),
        ("text.conf", 'bridge {\n id = "a\n}', "text.conf:2: the text that begins in line 2 has no end"),
        ("value.conf", "bridge {\n id = \n}", "value.conf:3: a value is missing"),
        ("equals.conf", "bridge {\n id a\n}", "equals.conf:2: expected '=' after 'id a'"),
        ("star.conf", "bridge {\n id = a*\n}", "star.conf:2: unexpected '*'; put the value into quotation marks"),
        ("key.conf", "bridge {\n = a\n}", "key.conf:2: expected a key, and found '='"),
        ("end.conf", "bridge { id = a }\n}", "end.conf:2: expected a key, and found '}'"),
        ("escape.conf", 'bridge { id = "\\q" }', "escape.conf:1: the text in quotation marks has an escape"),
        ("missing.conf", "bridge {\n id = ${none}\n}", "missing.conf:2: ${none} has no value; give it with --property none=VALUE"),
        ("brace.conf", "bridge {\n id = ${none\n}", "brace.conf:2: a reference ${...} has no end"),
    ],
)  # fmt: skip
def test_hostile_file_is_refused_with_its_line(name: str, data: str | bytes, error: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    start_s = time.monotonic()
    with pytest.raises(InvalidInput) as refused:
        import_sources(ImportOptions([tmp_path / name], tmp_path / "bascule.toml"))
    assert time.monotonic() - start_s < 20 * SLOWNESS
    assert error in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_command_reports_a_hostile_file_in_one_message_and_writes_nothing(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "laughs.xml").write_text(LAUGHS)
    done = bascule("config", "import", "laughs.xml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: laughs.xml:2: a document type")
    assert [path.name for path in tmp_path.iterdir()] == ["laughs.xml"]


def test_properties_file_with_a_line_without_a_key_is_refused(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "broker.xml").write_text("<configuration><core/></configuration>")
    (tmp_path / "users").write_text("ann = secret\n= other\n")
    done = bascule("config", "import", "broker.xml", "--users", "users")
    assert (done.returncode, "users:2: not a line of a properties file" in done.stderr) == (2, True)


def test_file_in_utf_16_is_read(tmp_path: Path, bascule: Bascule) -> None:
    addresses = '<addresses><address name="é"><anycast/></address></addresses>'
    text = f'<?xml version="1.0" encoding="UTF-16"?><configuration><core>{addresses}</core></configuration>'
    (tmp_path / "broker.xml").write_text(text, encoding="utf-16")
    assert bascule("config", "import", "broker.xml").returncode == 0
    assert 'name = "é"' in (tmp_path / "bascule.toml").read_text()


def test_names_cannot_break_out_of_the_written_file(tmp_path: Path, bascule: Bascule) -> None:
    name = "a&quot;&#10;[broker]&#10;host = &quot;0.0.0.0&quot;&#10;#"
    core = f'<addresses><address name="{name}"><anycast/></address><address name="b&quot;\\"><multicast/></address></addresses>'
    (tmp_path / "broker.xml").write_text(f"<configuration><core>{core}</core></configuration>")
    done = bascule("config", "import", "broker.xml")
    assert done.returncode == 0
    text = (tmp_path / "bascule.toml").read_text()
    assert "0.0.0.0" not in text
    assert 'name = "b\\"\\\\"' in text
    assert bascule("config", "check", "--config", "bascule.toml").returncode == 0


#: Each of many children would repeat the name of its parent.
CHILDREN = f"<address-settings><address-setting match='{'a' * 1_000_000}'>{'<b>1</b>' * 50_000}</address-setting></address-settings>"


def repeated(section: str, element: str) -> str:
    return f"<{section}>{''.join(element.replace('N', str(number)) for number in range(4000))}</{section}>"


def test_entry_of_very_many_lines_is_read_in_time(tmp_path: Path) -> None:
    (tmp_path / "a.properties").write_text(CONTINUED)
    start_s = time.monotonic()
    rows = import_sources(ImportOptions([tmp_path / "a.properties"], tmp_path / "bascule.toml")).report.rows
    assert time.monotonic() - start_s < 20 * SLOWNESS
    assert max(len(row.value) for row in rows) < 300


@pytest.mark.parametrize(
    "core",
    [
        CHILDREN,
        repeated("security-settings", "<security-setting match='N'><permission type='send' roles='N'/></security-setting>"),
        "<security-settings>" + repeated("security-setting", "<permission type='send' roles='N'/>") + "</security-settings>",
        repeated("addresses", "<address name='N'><anycast><queue name='N'/></anycast></address>"),
        repeated("address-settings", "<address-setting match='N.#'><expiry-delay>1</expiry-delay></address-setting>"),
    ],
)
def test_large_file_is_imported_in_time_and_with_short_rows(core: str, tmp_path: Path) -> None:
    core = core.replace("<security-setting>", "<security-setting match='a'>")
    (tmp_path / "broker.xml").write_text(f"<configuration><core>{core}</core></configuration>")
    start_s = time.monotonic()
    rows = import_sources(ImportOptions([tmp_path / "broker.xml"], tmp_path / "bascule.toml")).report.rows
    assert time.monotonic() - start_s < 60 * SLOWNESS
    assert max(len(part) for row in rows for part in (row.element, row.value, row.setting, row.note)) < 2100
