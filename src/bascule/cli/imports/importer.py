"""Read the sources of an import, and write its result: a configuration file and a file of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from bascule.amqp.verifiers import ITERATIONS
from bascule.cli.imports.artemis import import_artemis
from bascule.cli.imports.artemis_acceptors import NO_CERTIFICATES, CertificateFiles
from bascule.cli.imports.artemis_security import named_roles
from bascule.cli.imports.artemis_users import ImportedUser, check_not_exchanged, define_roles, import_roles, import_users
from bascule.cli.imports.context import ImportContext
from bascule.cli.imports.draft import SettingsDraft
from bascule.cli.imports.hocon import HoconLeaf, read_hocon
from bascule.cli.imports.jms_bridge import import_jms_bridge
from bascule.cli.imports.report import ImportReport
from bascule.cli.imports.substitution import FILE_BYTES_MAX, PropertyEntry, PropertyReferences, property_entries
from bascule.cli.imports.toml_text import toml_text
from bascule.cli.imports.xml_tree import XmlNode, read_xml
from bascule.config.load import settings_of_text
from bascule.config.private_file import replace_private
from bascule.config.users_file import changing, read
from bascule.core.errors import InvalidInput

#: Beginnings of XML in UTF-8 with a byte order mark, and in UTF-16.
_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"<\x00", b"\x00<")


@dataclass(frozen=True)
class ImportOptions:
    """What the user of the command gives. ``to`` is the file to write."""

    sources: Sequence[Path]
    to: Path
    users: Path | None = None
    roles: Path | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    certificates: CertificateFiles = NO_CERTIFICATES
    allow_insecure: bool = False
    iterations: int = ITERATIONS

    @property
    def users_file(self) -> Path:
        """Return the file of users to write."""
        return self.to.with_suffix(".users")


class ImportResult(NamedTuple):
    """A configuration, its users (None if it has no file of users), and the report."""

    text: str
    users: list[ImportedUser] | None
    report: ImportReport


def import_sources(options: ImportOptions) -> ImportResult:
    """Return the configuration of the sources. Raises InvalidInput if a source cannot be read, or a certificate cannot be used."""
    if not options.to.name or options.to.name == "..":
        raise InvalidInput(f"--to {options.to}: must be the path of a file")
    if options.to == options.users_file:
        raise InvalidInput(f"--to {options.to}: the ending .users is for the file of users; choose another one")
    read = {path.resolve() for path in (*options.sources, options.users, options.roles) if path is not None}
    if written := [path for path in (options.to, options.users_file) if path.resolve() in read]:
        raise InvalidInput(f"{written[0]} is a source of the import; write to another file with --to")
    report, draft = ImportReport(), SettingsDraft()
    trees: list[tuple[str, XmlNode]] = []
    bridges: list[tuple[str, list[HoconLeaf]]] = []
    for source in options.sources:
        data = _read(source)
        if _is_xml(data, source):
            trees.append((source.name, read_xml(data, source.name, PropertyReferences(options.properties, source.name))))
        else:
            bridges.append((source.name, _bridge_leaves(data, source, options.properties)))
    if len(trees) > 1 or len(bridges) > 1:
        raise InvalidInput("give at most one broker.xml and one configuration of the JMS Bridge")
    for name, leaves in bridges:
        import_jms_bridge(leaves, name, report, draft)
    users: list[ImportedUser] | None = None
    for name, root in trees:
        context = ImportContext(name, report, draft)
        import_artemis(context, root, files=options.certificates, allow_insecure=options.allow_insecure)
        users = _import_logins(options, context, root)
    names = ", ".join(source.name for source in options.sources)
    text = toml_text(draft.tree, f"Imported from {names} by `bascule config import`.\nRead its report: some settings have no counterpart.")
    tls = settings_of_text(text, str(options.to)).broker.tls
    if tls.enabled:
        from bascule.server.listener_tls import amqp_tls  # needs the extra `broker`

        amqp_tls(tls)
    return ImportResult(text, users, report)


def _import_logins(options: ImportOptions, context: ImportContext, root: XmlNode) -> list[ImportedUser] | None:
    """Import users and roles; None if every client may connect."""
    open_to_all = bool(context.draft.section("broker").get("allow_anonymous"))
    users: list[ImportedUser] | None = None
    logins = [] if options.users is None else _entries(options.users)
    members = [] if options.roles is None else _entries(options.roles)
    check_not_exchanged(logins, members, options.roles)
    if options.users is not None:
        users = import_users(logins, options.users.name, options.users_file, context.report)
    elif not open_to_all:
        users = []
        note = "no users were given: add them with `bascule user add NAME --role ROLE`, or import again with --users and --roles"
        context.remark(root, f"broker.users_file = {options.users_file}", note, part="/users (not given)")
    roles = {} if options.roles is None else import_roles(members, options.roles.name, context.report)
    place = next((node for node in root.all() if node.name == "security-settings"), root)
    define_roles(context.draft, context.report, roles, list(named_roles(context)), (context.file, place.line))
    if users is not None:
        context.draft.set_unchecked("broker", {"users_file": str(options.users_file)})
    return users


def write_result(options: ImportOptions, result: ImportResult, *, force: bool) -> list[Path]:
    """Write the files, with the mode 0600, and return their paths.

    Users of an existing file of users stay as they are. Raises InvalidInput if a file exists and ``force`` is not given, or cannot be
    written.
    """
    paths = [options.to] if result.users is None else [options.to, options.users_file]
    for path in paths:
        if path.exists() and not force:
            raise InvalidInput(f"{path} exists; use --force to replace it, or --to to write another file")
    try:
        if result.users is not None:
            _write_users(options, result.users)
        replace_private(options.to, result.text.encode())
    except OSError as error:
        raise InvalidInput(f"{error.filename or options.to}: {error.strerror}") from error
    return paths


def _write_users(options: ImportOptions, users: Sequence[ImportedUser]) -> None:
    known = read(options.users_file).users if options.users_file.exists() else {}
    made = [each.user(options.iterations) for each in users if each.name not in known]
    with changing(options.users_file) as draft:
        for user in made:
            draft.content = draft.content.with_user(user)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidInput(f"{path}: larger than {FILE_BYTES_MAX >> 20} MiB")
    return data


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidInput(f"{path}:{line}: not UTF-8 (byte {error.start})") from error


def _entries(path: Path) -> list[PropertyEntry]:
    return list(property_entries(_text(_read(path), path), path.name))


def _is_xml(data: bytes, path: Path) -> bool:
    return path.suffix.lower() == ".xml" or data.lstrip()[:1] == b"<" or data.startswith(_MARKS)


def _bridge_leaves(data: bytes, path: Path, properties: Mapping[str, str]) -> list[HoconLeaf]:
    text = _text(data, path)
    if path.suffix == ".properties":
        return [HoconLeaf(tuple(key.split(".")), value, line) for line, key, value in property_entries(text, path.name)]
    return read_hocon(text, path.name, properties)
