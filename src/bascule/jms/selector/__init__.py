"""The selector language of Jakarta Messaging 3.1 (section 3.8.1): a text is compiled to a predicate over messages."""

from __future__ import annotations

from bascule.core.caches import peer_cache
from bascule.jms.selector.errors import SelectorError
from bascule.jms.selector.evaluate import Evaluator, Lookup, evaluator
from bascule.jms.selector.nodes import Literal
from bascule.jms.selector.parser import ParsedSelector, parse

__all__ = ["Lookup", "Selector", "SelectorError", "compile_selector"]

#: Number of cached compiled selectors: a program uses few, and each attach of a consumer compiles again.
_CACHE_SIZE = 256
#: Longer selectors are not cached, because a client may use any number of them.
_CACHED_LENGTH_MAX = 256
#: A blank selector is true for every message.
_BLANK = ParsedSelector(Literal(True), 0, frozenset())


class Selector:
    """A compiled selector. ``identifiers`` are the header fields and properties it uses.

    ``steps`` is the maximum cost of an evaluation, in steps of about a microsecond, without reading the identifiers.
    """

    __slots__ = ("_evaluate", "identifiers", "steps", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        tree, self.steps, self.identifiers = parse(text) if text.strip() else _BLANK
        self._evaluate: Evaluator = evaluator(tree)

    def matches(self, lookup: Lookup) -> bool:
        """Return whether the selector is true (neither false nor unknown) for the message of ``lookup``.

        ``lookup(name)`` returns None for a missing value, otherwise a bool, int, float or str, or one of the numeric types of
        bascule.amqp.types. A value of any other type compares as false.
        """
        return self._evaluate(lookup) is True

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return compile_selector, (self.text,)


def compile_selector(text: str | None) -> Selector:
    """Compile a selector; None and blank text match every message. Raises SelectorError."""
    return _compile(text or "")


@peer_cache(entries=_CACHE_SIZE, entry_bytes=40_000, length_max=_CACHED_LENGTH_MAX)
def _compile(text: str) -> Selector:
    return Selector(text)
