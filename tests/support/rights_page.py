"""The page of Kafka's ACLs that each process needs, made from the data in this module: docs/reference/kafka-acls.md.

    python -m tests.support.rights_page        # writes the page

``tests/scenarios/test_kafka_acls.py`` gives broker, pipelines and programs exactly these ACLs, and looks in the log of Kafka's authorizer
for requests that were denied and for rights that nobody used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "kafka-acls.md"
HEAD: Final = """# Kafka ACLs

This page lists the rights that each process needs in a Kafka with ACLs. Give each process its own Kafka user, or give one user the rights
of all processes. `PREFIX` is the setting `journal.prefix`, and `BRIDGE` is `bridge.id`; both are `bascule` by default. A name that ends in
`*` is a prefix (`--resource-pattern-type prefixed`). Kafka allows `Describe` to everybody who has `Read`, `Write` or `Delete`. No process
needs a right on the cluster.

`python -m tests.support.rights_page` generates this page, and `tests/scenarios/test_kafka_acls.py` runs broker, pipelines and programs with
exactly these rights.

For example, this command gives the user `bascule-pipelines` the rights on the first topic of the pipelines:

    kafka-acls.sh --bootstrap-server kafka1:9093 --command-config admin.properties --add --allow-principal User:bascule-pipelines \\
        --operation Read --operation DescribeConfigs --topic bascule.journal
"""
OPTIONAL: Final = " (recommended)"

READ, WRITE, CREATE, DELETE = AclOperation.READ, AclOperation.WRITE, AclOperation.CREATE, AclOperation.DELETE
DESCRIBE, CONFIGS = AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS
TOPIC, GROUP, ID = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
#: The rights of a process that creates a topic if it does not exist, checks its settings, reads and writes it.
OWNS: Final = (CREATE, CONFIGS, READ, WRITE)
#: The rights of a process that also deletes topics and records, and changes settings.
MAKES: Final = (*OWNS, DELETE, AclOperation.ALTER_CONFIGS)

_WORDS: Final = {TOPIC: "topic", GROUP: "group", ID: "transactional id"}
_OPERATIONS: Final = {
    READ: "Read", WRITE: "Write", CREATE: "Create", DELETE: "Delete", DESCRIBE: "Describe", CONFIGS: "DescribeConfigs",
    AclOperation.ALTER_CONFIGS: "AlterConfigs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Right:
    """Operations on a resource. A name that ends in ``*`` is a prefix; the words in capitals stand for names of the installation.

    Without an ``optional`` right, the process works, and does less.
    """

    resource: ResourceType
    name: str
    operations: tuple[AclOperation, ...]
    why: str
    optional: bool = False

    def bindings(self, principal: str, names: Mapping[str, str]) -> Iterator[AclBinding]:
        """Yield the ACLs for a principal such as ``User:ann``, with the given names in place of the words in capitals."""
        name = self.name
        for word, each in names.items():
            name = name.replace(word, each)
        pattern = ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL
        for operation in self.operations:
            yield AclBinding(self.resource, name.removesuffix("*"), pattern, principal, "*", operation, AclPermissionType.ALLOW)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of Bascule, or a program that uses it, and its rights."""

    title: str
    about: str
    rights: tuple[Right, ...]

    def bindings(self, principal: str, names: Mapping[str, str]) -> list[AclBinding]:
        """Return the ACLs of the process for a principal."""
        return [binding for right in self.rights for binding in right.bindings(principal, names)]


_READERS: Final = Right(GROUP, "bascule.*", (DESCRIBE,), "readers without a group: Kafka's client asks for the coordinator of some group")
_TRANSACTIONS: Final = Right(
    TOPIC, "__transaction_state", (CONFIGS, DESCRIBE), "errors that name the wrong setting of Kafka's transactions", optional=True
)

BROKER: Final = Process(
    "The broker",
    "`bascule broker`, and a standby. For `bascule up` with an external Kafka, add the rights of the pipelines.",
    (
        Right(TOPIC, "PREFIX.journal", (*OWNS, DELETE), "decisions and messages; the broker deletes old records"),
        Right(
            TOPIC, "PREFIX.ingress", (CREATE, CONFIGS, READ, DELETE), "messages from Kafka; the broker deletes those that it has journaled"
        ),
        Right(TOPIC, "PREFIX.snapshots", OWNS, "snapshots of its state"),
        Right(TOPIC, "PREFIX.store", OWNS, "messages that outlive their part of the journal"),
        Right(TOPIC, "PREFIX.brokers", OWNS, "election of the active broker, and messages between the brokers"),
        Right(
            TOPIC,
            "PREFIX.control",
            OWNS,
            "control of the pipelines; a broker that cannot read it, or write barrier records, does not become active",
        ),
        Right(TOPIC, "PREFIX.pipelines", (CREATE, CONFIGS, READ), "reports of the pipelines"),
        Right(TOPIC, "PREFIX.redrive", (CREATE, CONFIGS, READ), "which dead letters of the pipelines are done"),
        Right(TOPIC, "PREFIX.positions", (CONFIGS, READ, WRITE), "what the pipelines still need; the broker writes barrier records"),
        Right(TOPIC, "DEAD-LETTERS", (CONFIGS, DESCRIBE), "errors that name unsafe settings of this topic", optional=True),
        Right(TOPIC, "SOURCE", (DESCRIBE,), "`bascule ingress offsets`: each topic from which an ingress reads", optional=True),
        Right(TOPIC, "bascule.xa.*", (CONFIGS, DESCRIBE), "the same for the topics of transactions", optional=True),
        Right(TOPIC, "bascule.outbound", (CONFIGS, DESCRIBE), "the same for the topic of the adapter", optional=True),
        Right(TOPIC, "AUDIT", (WRITE,), "the topic of the [audit](../guides/audit.md), if `audit.topic` is set"),
        Right(
            TOPIC, "AUDIT", (READ,), "who sent and received a message: the [life of a message](../guides/what-happened.md)", optional=True
        ),
        Right(TOPIC, "TARGET", (READ,), "records that diverts wrote for a message, for the same", optional=True),
        Right(TOPIC, "DEAD-LETTERS", (READ,), "messages that no divert could convert, for the same, and `bascule redrive`", optional=True),
        Right(ID, "PREFIX.control", (WRITE,), "definitions of pipelines at run time, changed in transactions"),
        Right(GROUP, "PREFIX.brokers", (READ,), "election of the active broker"),
        Right(GROUP, "PREFIX.BRIDGE.*", (DESCRIBE,), "why a pipeline has stopped"),
        Right(GROUP, "bascule-reader", (DESCRIBE,), "readers of the journal"),
        _READERS,
    ),
)
PIPELINES: Final = Process(
    "The pipelines",
    "`bascule pipelines`. The processes of Spark's executors use the login of the driver.",
    (
        Right(TOPIC, "PREFIX.journal", (CONFIGS, READ), "messages for the diverts"),
        Right(TOPIC, "PREFIX.ingress", (CREATE, CONFIGS, WRITE), "messages for the broker"),
        Right(TOPIC, "PREFIX.positions", OWNS, "positions of the pipelines"),
        Right(TOPIC, "PREFIX.control", OWNS, "control of the pipelines; the driver writes barrier records"),
        Right(TOPIC, "PREFIX.pipelines", OWNS, "reports of the pipelines"),
        Right(TOPIC, "PREFIX.redrive", OWNS, "which dead letters are done; the driver writes barrier records"),
        Right(TOPIC, "DEAD-LETTERS", (CREATE, CONFIGS, WRITE), "`PREFIX.dead-letter`, or the setting `pipelines.dead_letter_topic`"),
        Right(TOPIC, "DEAD-LETTERS", (READ,), "[redrive](../guides/pipelines.md#redrive-dead-letters)", optional=True),
        Right(
            TOPIC,
            "TARGET",
            (CREATE, WRITE),
            "each topic to which a divert writes; `Create` is not needed with `pipelines.target_partitions = 0`",
        ),
        Right(TOPIC, "SOURCE", (READ,), "each topic from which an ingress reads"),
        Right(ID, "PREFIX.BRIDGE.*", (WRITE,), "transactions of the pipelines"),
        Right(
            GROUP,
            "PREFIX.BRIDGE.*",
            (DELETE, READ),
            "election of the driver; lag and state of the pipelines for monitors, deleted with a pipeline that was created at run time",
        ),
        _READERS,
        Right(GROUP, "spark-kafka-source-*", (READ,), "Spark's own reader, for diverts with a transformation", optional=True),
        _TRANSACTIONS,
    ),
)
VERIFY: Final = Process(
    "`bascule verify`",
    "Except for `bascule why` without `--admin`, all other commands that work on a broker ask its admin server, and need no Kafka user.",
    (
        Right(TOPIC, "PREFIX.journal", (READ,), "messages that the diverts should have written"),
        Right(TOPIC, "PREFIX.positions", (READ,), "how far the diverts are"),
        Right(
            TOPIC, "PREFIX.control", (READ,), "diverts that are defined at run time; without the right, they are left out", optional=True
        ),
        Right(TOPIC, "DEAD-LETTERS", (READ,), "messages that no divert could convert"),
        Right(TOPIC, "TARGET", (READ,), "each topic to which a divert writes"),
        _READERS,
    ),
)
WHY: Final = Process(
    "`bascule why`",
    "The command reads topics itself, and writes none.",
    (
        Right(TOPIC, "PREFIX.journal", (READ,), "what the broker recorded about a message"),
        Right(TOPIC, "PREFIX.snapshots", (READ,), "names of queues that were created before the oldest record of the journal"),
        Right(TOPIC, "PREFIX.store", (READ,), "messages whose journal records are gone"),
        Right(TOPIC, "PREFIX.positions", (READ,), "how far the diverts are"),
        Right(
            TOPIC, "PREFIX.control", (READ,), "diverts that are defined at run time; without the right, they are left out", optional=True
        ),
        Right(TOPIC, "DEAD-LETTERS", (READ,), "messages that no divert could convert"),
        Right(TOPIC, "TARGET", (READ,), "each topic to which a divert writes"),
        Right(TOPIC, "AUDIT", (READ,), "who sent and received the message, if `audit.topic` is set"),
        Right(GROUP, "bascule-reader", (DESCRIBE,), "readers of journal, snapshots and store"),
        _READERS,
    ),
)
BACKUP: Final = Process(
    "`bascule backup`",
    "The command also needs the rights to read each topic that `--topic` names.",
    (
        Right(TOPIC, "PREFIX.*", (CONFIGS, READ), "the journal and the topics that belong to it"),
        Right(TOPIC, "DEAD-LETTERS", (CONFIGS, READ), "messages that no divert could convert"),
        Right(TOPIC, "bascule.xa.*", (CONFIGS, READ), "topics of transactions, if they exist"),
        Right(TOPIC, "bascule.outbound", (CONFIGS, READ), "the topic of the adapter, if it exists"),
        _READERS,
    ),
)
RESTORE: Final = Process(
    "`bascule restore`",
    "The command also needs these rights on each topic that `bascule backup --topic` named. `Delete` is for the topics of an interrupted\n"
    "restore, and for the empty records of the journal.",
    (
        Right(TOPIC, "PREFIX.*", MAKES, "the journal and the topics that belong to it"),
        Right(TOPIC, "DEAD-LETTERS", MAKES, "messages that no divert could convert"),
        Right(TOPIC, "bascule.xa.*", MAKES, "topics of transactions"),
        Right(TOPIC, "bascule.outbound", MAKES, "the topic of the adapter"),
        Right(TOPIC, "SOURCE", (DESCRIBE,), "whether a topic of an ingress was recreated"),
        _READERS,
    ),
)
SPARK_READER: Final = Process(
    "A Spark job that reads the journal",
    '`spark.readStream.format("bascule")`.',
    (Right(TOPIC, "PREFIX.journal", (READ,), "messages"), _READERS),
)
SPARK_WRITER: Final = Process(
    "A Spark job that writes to destinations",
    '`stream.writeStream.format("bascule")`; `JOB` is its option `id`.',
    (
        Right(TOPIC, "PREFIX.positions", OWNS, "which batches were written"),
        Right(TOPIC, "PREFIX.ingress", (CREATE, CONFIGS, WRITE), "messages for the broker"),
        Right(ID, "PREFIX.BRIDGE.sink:JOB/*", (WRITE,), "transactions of the writer"),
        _READERS,
        _TRANSACTIONS,
    ),
)
TRANSACTIONS: Final = Process(
    "A program with transactions over several resources",
    "A `TransactionManager` with its log in Kafka and a `KafkaResource`, and the commands `bascule xa`, which load the manager\n"
    "of the program. `XA` is `bascule.xa` by default (`prefix` of `KafkaResource`). A manager with a log in a file or a database needs no\n"
    "`bascule.xa.decisions`.",
    (
        Right(TOPIC, "bascule.xa.decisions", OWNS, "decisions of the transaction manager"),
        Right(TOPIC, "XA.side", (*OWNS, DELETE), "records of branches that are not committed; programs delete old records"),
        Right(TOPIC, "XA.log", OWNS, "prepared branches"),
        Right(TOPIC, "TARGET", (CONFIGS, WRITE), "each topic to which the program sends, and which records it accepts"),
        Right(ID, "XA.*", (WRITE,), "transactions of the branches"),
        _READERS,
        _TRANSACTIONS,
    ),
)
ENDPOINT: Final = Process(
    "An endpoint of the resource adapter",
    "An endpoint reads records as consumer group `GROUP`.",
    (
        Right(TOPIC, "SOURCE", (CONFIGS, READ), "each topic that the endpoint reads, and the size of its records"),
        Right(TOPIC, "GROUP.inbound", (*OWNS, DELETE), "records in flight; endpoints delete old records"),
        Right(TOPIC, "GROUP.retry", OWNS, "records that are tried again"),
        Right(TOPIC, "GROUP.dead-letter", OWNS, "records that failed too often; the endpoint counts them"),
        Right(GROUP, "GROUP", (READ,), "distribution of the partitions, and committed offsets"),
        Right(GROUP, "GROUP.dead-letter.returned", (DESCRIBE,), "number of dead letters that were not returned"),
        _READERS,
    ),
)
RETURNS: Final = Process(
    "`bascule adapter`",
    "`bascule adapter status`, `bascule adapter dead-letters list` and `return`. Only `return` needs the rights to write.",
    (
        Right(TOPIC, "GROUP.inbound", (READ, WRITE), "records in flight; the command writes barrier records"),
        Right(TOPIC, "GROUP.dead-letter", (READ,), "dead letters"),
        Right(TOPIC, "GROUP.retry", (WRITE,), "returned dead letters"),
        Right(TOPIC, "SOURCE", (READ,), "records that were too large for their dead letter"),
        Right(GROUP, "GROUP.dead-letter.returned", (READ,), "how many dead letters were returned"),
        Right(ID, "GROUP.dead-letter.returned", (WRITE,), "transaction of the return"),
        _READERS,
    ),
)
SENDER: Final = Process(
    "A program that sends with the resource adapter",
    "A factory with `KafkaTransactions` needs all of these rights; `FACTORY` is the `id` of `KafkaTransactions`. Without transactions, it\n"
    "needs only the right to write its topics. With `XaSends`, it needs the rights of a program with transactions over several resources.",
    (
        Right(TOPIC, "TARGET", (WRITE,), "each topic to which the program sends"),
        Right(TOPIC, "bascule.outbound", OWNS, "marks of committed transactions"),
        Right(ID, "FACTORY.*", (WRITE,), "transactions of the connections"),
        _READERS,
        _TRANSACTIONS,
    ),
)
PROCESSES: Final = (
    BROKER, PIPELINES, VERIFY, WHY, BACKUP, RESTORE, SPARK_READER, SPARK_WRITER, TRANSACTIONS, ENDPOINT, RETURNS, SENDER,
)  # fmt: skip


def page() -> str:
    """Return the content of the page."""
    return "\n".join([HEAD, *map(_section, PROCESSES)])


def _section(process: Process) -> str:
    rows = [f"| {_WORDS[each.resource]} | `{each.name}` | {_named(each)} | {each.why} |" for each in process.rights]
    return "\n".join(
        [f"## {process.title}\n", f"{process.about}\n", "| object | name | operations | for |", "| --- | --- | --- | --- |", *rows, ""]
    )


def _named(right: Right) -> str:
    return ", ".join(sorted(_OPERATIONS[each] for each in right.operations)) + (OPTIONAL if right.optional else "")


if __name__ == "__main__":
    PAGE.write_text(page())
