"""Senders whose messages enter many queues go on in the order in which they began to wait, and each message enters each queue once."""

from __future__ import annotations

from typing import Final

import pytest

from tests.sim.crowd import CrowdSimulation

#: Number of seeds of one test.
SEEDS: Final = 100


@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1_001, 20_001, SEEDS))])
def test_senders_go_on_in_order_and_each_message_enters_each_queue_once(first: int) -> None:
    waited = losses = 0
    for seed in range(first, first + SEEDS):
        run = CrowdSimulation(seed)
        tally = run.run()
        assert not tally.names, f"seed {seed}: {tally}"
        waited += run.waited
        losses += run.losses
    assert waited > SEEDS
    assert losses > 0
