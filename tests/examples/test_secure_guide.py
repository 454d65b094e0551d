"""The commands of the guide about security, against a broker that other machines could reach, and a Kafka with TLS and passwords."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.examples.pages import ROOT, Block, blocks, missing
from tests.examples.test_docs import Reader
from tests.scenarios.secured import PASSWORD, SecuredKafka

GUIDE = ROOT / "docs" / "guides" / "secure.md"
#: The address of the Kafka in the guide.
CLUSTER = "kafka.example:9093"


class Guided(Reader):
    """A reader who writes each part of the configuration where the guide shows it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.replaced = {CLUSTER: CLUSTER}
        self.output = ""

    def read(self, part: Sequence[Block]) -> None:
        for block in part:
            if block.purpose == "run":
                self.output = self.run(block)
            elif block.purpose == "config":
                with (self.directory / "bascule.toml").open("a") as file:
                    file.write(block.text.replace(CLUSTER, self.replaced[CLUSTER]))
            elif block.purpose == "shows":
                line = missing(block.text, self.output)
                assert line is None, f"line {block.line}: not shown: {line}\n{self.output}{self.logs()}"


@pytest.mark.services
@pytest.mark.timeout(900)
def test_commands_of_the_guide_about_security_print_the_output_shown(tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    reader, found = Guided(tmp_path / "reader"), blocks(GUIDE)
    first, second = (number for number, block in enumerate(found) if block.purpose == "serve")
    (cluster,) = (number for number, block in enumerate(found) if block.purpose == "config" and CLUSTER in block.text)
    reader.read(found[:first])
    with reader.serving(found[first]):
        reader.read(found[first:cluster])
    with SecuredKafka(tmp_path / "kafka") as kafka:
        reader.replaced[CLUSTER] = kafka.secured
        (reader.directory / "kafka-ca.pem").write_bytes(kafka.authority.certificate.read_bytes())
        (reader.directory / "kafka-password").write_text(f"{PASSWORD}\n")
        reader.read(found[cluster:second])
        with reader.serving(found[second]):
            reader.read(found[second:])
    logs = reader.logs()
    for secret in (*reader.directory.glob("*-password"), reader.directory / "view-token"):
        assert secret.read_text().strip() not in logs, f"{secret.name} is in a log"
