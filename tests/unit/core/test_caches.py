"""Caches of data that peers have sent."""

from __future__ import annotations

from bascule.core import caches
from bascule.core.caches import forget_peers, kept_bytes, peer_cache
from bascule.jms.sections import scan
from bascule.jms.selector import compile_selector
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes


def test_peer_cache_keeps_results_only_of_short_arguments() -> None:
    forget_peers()
    calls: list[str] = []

    @peer_cache(entries=2, entry_bytes=100, length_max=5)
    def doubled(text: str) -> str:
        calls.append(text)
        return text * 2

    try:
        assert [doubled(text) for text in ("short", "short", "longer", "longer")] == ["shortshort"] * 2 + ["longerlonger"] * 2
        assert calls == ["short", "longer", "longer"]
        assert kept_bytes() == 100
        for text in "abc":
            doubled(text)
        assert kept_bytes() == 200
    finally:
        caches._CACHES.pop()


def test_forget_peers_empties_all_peer_caches() -> None:
    broker, sender = BrokerInMemory(), Sender()
    broker.send("q", message_bytes("x", message_id="ID:1"), sender, 1, container="somebody")
    broker.settle()
    compile_selector("a = 'b'")
    scan(message_bytes("x"))
    assert kept_bytes() > 0
    forget_peers()
    assert kept_bytes() == 0


def test_long_selectors_are_compiled_each_time() -> None:
    long = " OR ".join(["a = 'b'"] * 100)
    assert compile_selector(long) is not compile_selector(long)
    assert compile_selector("a = 'b'") is compile_selector("a = 'b'")
