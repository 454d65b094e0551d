"""Names for connection factories, as in JNDI: the sender knows a name, and the main program binds a factory to it."""

from __future__ import annotations

import difflib
import threading
from typing import Any, TypeVar, overload

from bascule.core.errors import InvalidInput

FactoryT = TypeVar("FactoryT")


class Registry:
    """Names such as ``kafka/orders`` and ``jms/orders``. Thread-safe."""

    def __init__(self) -> None:
        self._factories: dict[str, Any] = {}
        self._lock = threading.Lock()

    def bind(self, name: str, factory: object, *, again: bool = False) -> None:
        """Bind a KafkaConnectionFactory or JmsConnectionFactory to a name. ``again`` allows a name that is bound to another factory.

        Raises InvalidInput.
        """
        if not name or name != name.strip("/ ") or "//" in name:
            raise InvalidInput(f"{name!r} is not a valid name; use words separated by /, for example kafka/orders")
        with self._lock:
            if not again and name in self._factories:
                raise InvalidInput(f"{name!r} is already bound; replace the factory with bind(..., again=True)")
            self._factories[name] = factory

    def unbind(self, name: str) -> None:
        """Remove a name. The owner of the factory closes it."""
        with self._lock:
            self._factories.pop(name, None)

    @overload
    def lookup(self, name: str) -> Any: ...

    @overload
    def lookup(self, name: str, kind: type[FactoryT]) -> FactoryT: ...

    def lookup(self, name: str, kind: type[Any] = object) -> Any:
        """Return the factory that is bound to a name, checked against ``kind`` if given. Raises InvalidInput with the nearest name."""
        with self._lock:
            if (factory := self._factories.get(name)) is not None:
                if not isinstance(factory, kind):
                    raise InvalidInput(f"{name!r} is bound to a {type(factory).__name__}, not to a {kind.__name__}")
                return factory
            bound = sorted(self._factories)
        near = difflib.get_close_matches(name, bound, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"bound names: {', '.join(bound) or 'none'}"
        raise InvalidInput(f"nothing is bound to {name!r}; {hint}")

    def names(self) -> list[str]:
        """Return all bound names."""
        with self._lock:
            return sorted(self._factories)


#: The registry of this process.
registry = Registry()
bind, unbind, lookup = registry.bind, registry.unbind, registry.lookup
