"""The requests of the guide about pipelines, sent to a broker without a driver: the answers are those that the guide shows."""

from __future__ import annotations

from pathlib import Path

from bascule.embedded.kafka import EmbeddedKafka
from tests.examples.pages import ROOT, blocks, missing, typed
from tests.support.system import System

GUIDE = ROOT / "docs" / "guides" / "pipelines.md"
CONFIG = """
[[divert]]
name = "orders"
from = "orders"
to = "kafka.orders"
"""
ANSWER_S = 60.0


def test_requests_of_the_pipelines_guide_get_the_answers_shown(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> None:
    with System(kafka.bootstrap, tmp_path, prefix=topic_prefix, config=CONFIG) as system:
        output, shown = "", 0
        for block in blocks(GUIDE):
            if block.purpose == "run":
                output = typed(block.text.replace(":8672/", f":{system.admin_port}/"), tmp_path, ANSWER_S)
            elif block.purpose == "shows":
                shown += 1
                assert missing(block.text, output) is None, f"line {block.line}: {output}"
    assert shown >= 3
