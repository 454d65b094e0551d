"""XML of an untrusted file as a tree with line numbers: no document type, no entities, no includes, bounded in every direction."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesNSImpl, InputSource, Locator

from defusedxml import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from bascule.cli.imports.report import shortened
from bascule.cli.imports.substitution import PropertyReferences
from bascule.core.errors import InvalidInput

#: Artemis' own schema nests a dozen levels.
DEPTH_MAX: Final = 64
ELEMENTS_MAX: Final = 100_000
ATTRIBUTES_MAX: Final = 200_000
TEXT_CHARACTERS_MAX: Final = 1 << 20
XINCLUDE: Final = "http://www.w3.org/2001/XInclude"
_XSI: Final = "http://www.w3.org/2001/XMLSchema-instance"


@dataclass(eq=False)
class XmlNode:
    """One element. Names have no namespace. ``defaults`` are the properties whose default stands in the text or an attribute."""

    name: str
    line: int
    path: str
    attributes: dict[str, str]
    text: str = ""
    children: list[XmlNode] = field(default_factory=list)
    defaults: tuple[str, ...] = ()
    #: Names of attributes that are reported, or part of the path; "" stands for the text.
    reported: set[str] = field(default_factory=set)

    def each(self, *names: str) -> Iterator[XmlNode]:
        """Yield the children with one of these names."""
        return (child for child in self.children if child.name in names)

    def child(self, name: str) -> XmlNode | None:
        """Return the last child with this name, which is the one that counts in Artemis."""
        return next((child for child in reversed(self.children) if child.name == name), None)

    def attribute(self, name: str) -> str:
        """Return an attribute that needs no row of its own; "" if it is missing."""
        self.reported.add(name)
        return self.attributes.get(name, "").strip()

    def all(self) -> Iterator[XmlNode]:
        """Yield this element and all elements in it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


def read_xml(data: bytes, file: str, references: PropertyReferences) -> XmlNode:
    """Return the root element. Raises InvalidInput with the line for XML that is not well-formed, not allowed or too large."""
    parser = DefusedExpatParser(namespaceHandling=1, forbid_dtd=True)
    builder = _TreeBuilder(file, references)
    parser.setContentHandler(builder)
    source = InputSource(file)
    source.setByteStream(io.BytesIO(data))
    try:
        parser.parse(source)
    except SAXParseException as error:
        raise InvalidInput(f"{file}:{error.getLineNumber()}: not well-formed XML: {error.getMessage()}") from None
    except DefusedXmlException:
        line = parser.getLineNumber()
        raise InvalidInput(f"{file}:{line}: a document type (<!DOCTYPE>) and entities are not allowed; remove them") from None
    except (LookupError, ValueError) as error:
        raise InvalidInput(f"{file}: the encoding that the first line names cannot be read ({error}); save the file as UTF-8") from None
    if builder.root is None:
        raise InvalidInput(f"{file}: not well-formed XML: no element found")
    references.check()
    return builder.root


class _TreeBuilder(ContentHandler):
    def __init__(self, file: str, references: PropertyReferences) -> None:
        super().__init__()
        self.root: XmlNode | None = None
        self._file = file
        self._references = references
        self._open: list[XmlNode] = []
        self._texts: list[list[str]] = []
        self._elements = 0
        self._attributes = 0
        self._characters = 0
        self._locator: Locator | None = None

    def setDocumentLocator(self, locator: Locator) -> None:  # noqa: N802 - SAX's name
        self._locator = locator

    @property
    def _line(self) -> int:
        return (self._locator.getLineNumber() if self._locator else None) or 0

    def startElementNS(self, name: tuple[str | None, str], _qname: str | None, attrs: AttributesNSImpl) -> None:  # noqa: N802
        namespace, local = name
        self._elements += 1
        self._attributes += len(attrs)
        if namespace == XINCLUDE:
            href = shortened(attrs.getValueByQName("href") if "href" in attrs.getQNames() else "")
            self._refuse(
                f"<xi:include href={href!r}> is not followed; import the output of `xmllint --xinclude {self._file}`, or put the content"
                " of that file here"
            )
        if len(self._open) >= DEPTH_MAX:
            self._refuse(f"elements are nested more than {DEPTH_MAX} deep")
        if self._elements > ELEMENTS_MAX:
            self._refuse(f"the file has more than {ELEMENTS_MAX:,} elements")
        if self._attributes > ATTRIBUTES_MAX:
            self._refuse(f"the elements have more than {ATTRIBUTES_MAX:,} attributes")
        line = self._line
        attributes, defaults = dict[str, str](), list[str]()
        for (space, key), raw in attrs.items():
            if space == _XSI or key.startswith("xmlns"):
                continue
            attributes[key], used = self._references.replaced(raw, line)
            defaults += used
        parent = self._open[-1] if self._open else None
        node = XmlNode(local, line, _path(parent, local, attributes), attributes, defaults=tuple(defaults))
        if parent is None:
            self.root = node
        else:
            parent.children.append(node)
        self._open.append(node)
        self._texts.append([])

    def characters(self, content: str) -> None:
        self._characters += len(content)
        if self._characters > TEXT_CHARACTERS_MAX:
            self._refuse(f"the elements have more than {TEXT_CHARACTERS_MAX:,} characters of text")
        if self._texts:
            self._texts[-1].append(content)

    def endElementNS(self, _name: tuple[str | None, str], _qname: str | None) -> None:  # noqa: N802
        node = self._open.pop()
        text, defaults = self._references.replaced("".join(self._texts.pop()).strip(), node.line)
        node.text = text.strip()
        node.defaults += defaults

    def _refuse(self, reason: str) -> None:
        raise InvalidInput(f"{self._file}:{self._line}: {reason}")


def _path(parent: XmlNode | None, name: str, attributes: dict[str, str]) -> str:
    """Return the path of an element below <core>, with its name or match."""
    if parent is None or name == "core":
        return shortened(name)
    identity = next((attributes[key] for key in ("match", "name", "type", "string") if key in attributes), None)
    own = shortened(name) if identity is None else f'{shortened(name)}["{shortened(identity)}"]'
    return own if parent.name == "core" else f"{parent.path}/{own}"
