"""What `bench.xa` measures: kinds of transactions, who runs them, and with how many clients at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of transaction: its resources, and the work in each resource."""

    name: str
    resources: tuple[str, ...]
    #: Each transaction receives a message before it sends one.
    receives: bool = False
    #: PostgreSQL does not prepare: its commit is the decision.
    decides: bool = False
    #: The mode of the peer with the same work, if there is one.
    peer: str | None = None

    @property
    def title(self) -> str:
        """Return a description of the transaction."""
        parts = ["receive"] if self.receives else []
        parts += [verb for resource, verb in (("postgres", "insert"), ("kafka", "produce"), ("jms", "send")) if resource in self.resources]
        how = "decision in the database" if self.decides else "two phases" if len(self.resources) > 1 else "one phase"
        return f"{', '.join(parts)}: {how}"


#: JMS with PostgreSQL, and each alone, have a peer. The decision in the database is compared with the same work in two phases.
MODES = (
    Mode("jms-send", ("jms",), peer="jms-send"),
    Mode("jms-relay", ("jms",), receives=True, peer="jms-relay"),
    Mode("postgres", ("postgres",), peer="postgres"),
    Mode("jms-postgres-send", ("postgres", "jms"), peer="jms-postgres-send"),
    Mode("jms-postgres-relay", ("postgres", "jms"), receives=True, peer="jms-postgres-relay"),
    Mode("jms-postgres-send-deciding", ("postgres", "jms"), decides=True, peer="jms-postgres-send"),
    Mode("jms-postgres-relay-deciding", ("postgres", "jms"), receives=True, decides=True, peer="jms-postgres-relay"),
    Mode("jms-kafka-send", ("kafka", "jms")),
    Mode("jms-kafka-relay", ("kafka", "jms"), receives=True),
    Mode("all-send", ("postgres", "kafka", "jms")),
    Mode("all-relay", ("postgres", "kafka", "jms"), receives=True),
)


@dataclass(frozen=True, slots=True)
class Clients:
    """The number of client processes, and of threads in each process; a thread runs one transaction at a time."""

    processes: int
    threads: int

    @property
    def title(self) -> str:
        """Return a description."""
        if self.processes > 1:
            return f"{self.processes} processes"
        return f"{self.threads} threads" if self.threads > 1 else "1"


#: Whose figures the ratios compare: Bascule's, from Python and from Java, with the peer's.
PYTHON, JAVA, PEER, APART = "Bascule, Python", "Bascule, Java", "Artemis, Java", "not atomic"
CONTENDERS = {
    PYTHON: "Bascule's transaction manager, JMS client and broker, psycopg",
    JAVA: "Narayana, bascule-xa-jakarta with Qpid JMS, Bascule's broker, PostgreSQL's JDBC driver",
    PEER: "Narayana, Artemis with its own client, PostgreSQL's JDBC driver",
    APART: "the same from Python without a transaction: each resource commits for itself",
}


def runs(contender: str, mode: Mode, clients: Clients) -> bool:
    """Return whether a contender takes part in a mode with a number of clients."""
    if contender in (PYTHON, APART):
        return contender == PYTHON or (len(mode.resources) > 1 and not mode.receives and not mode.decides)
    # PostgreSQL alone is the same with any broker that is not used.
    return clients.processes == 1 and mode.peer == mode.name and (contender == PEER or "jms" in mode.resources)
