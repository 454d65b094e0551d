"""What transactions of Bascule's manager cost: round trips to PostgreSQL and the broker, writes, wake-ups and calls of Python functions.

    python -m bench.xa_counts [--functions]

The program prints a table, and with --functions the functions called most. The counts do not depend on the load of the machine, so a test
bounds them. PostgreSQL is real. The broker is a protocol engine that gives each answer at once.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import psycopg

from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, DeclareReceived, Flowed, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, Declared, TransactionalState
from bascule.client import Queue
from bascule.client.message import Message, encode
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.jms.message import decode_message
from bascule.xa import FileLog, TransactionManager
from bascule.xa.errors import XA_OK
from bascule.xa.jms import JmsResource
from bascule.xa.postgres import PostgresResource
from tests.unit.client.server import obliging, server

TABLE: Final = "counted"
QUEUE: Final = Queue("counted")
RECEIVE_S: Final = 30.0
#: Transactions before those that are counted: they open connections and consumers.
FIRST: Final = 12
COUNTED: Final = 10
#: Functions in the list of those called most.
LISTED: Final = 60
_READY: Final = b"Z"


@dataclass(frozen=True)
class Kind:
    """A kind of transaction."""

    name: str
    resources: tuple[str, ...]
    receives: bool = False
    decides: bool = False


KINDS: Final = (
    Kind("insert; one phase", ("postgres",)),
    Kind("receive, send; one phase", ("jms",), receives=True),
    Kind("insert, send; two phases", ("postgres", "jms")),
    Kind("receive, insert, send; two phases", ("jms", "postgres"), receives=True),
    Kind("receive, insert, send; decision in the database", ("jms", "postgres"), receives=True, decides=True),
)


@dataclass
class Counts:
    """The costs of one transaction, on average."""

    #: Round trips to PostgreSQL, and requests to the broker whose answer the transaction waits for.
    postgres: float
    broker: float
    #: Writes to the broker's socket, and wake-ups of the thread of the connection by other threads.
    writes: float
    wakes: float
    #: Calls of Python functions, in the thread of the application and in that of the connection.
    calls: float
    functions: Counter[CodeType]

    def listed(self) -> str:
        """Return the functions called most, with their calls for each transaction."""
        most = self.functions.most_common(LISTED)
        return "\n".join(f"{each / COUNTED:6.1f} {code.co_filename}:{code.co_firstlineno} {code.co_qualname}" for code, each in most)


class PostgresProxy:
    """Counts the round trips of PostgreSQL's clients: the server is ready for the next request once for each."""

    def __init__(self, port: int) -> None:
        self.round_trips = 0
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server_side = socket.create_connection(("127.0.0.1", self._server))
                threading.Thread(target=self._carry, args=(client, server_side, None), daemon=True).start()
                threading.Thread(target=self._carry, args=(server_side, client, bytearray()), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, read: bytearray | None) -> None:
        with source, suppress(OSError):  # either may be closed by the other direction
            while data := source.recv(65536):
                if read is not None:
                    read += data
                    self._count(read)
                to.sendall(data)
            to.shutdown(socket.SHUT_RDWR)

    def _count(self, read: bytearray) -> None:
        """Take the whole messages from ``read``: a type of one byte, and the length of the rest, itself included."""
        while len(read) >= 5 and len(read) >= (size := 1 + int.from_bytes(read[1:5], "big")):
            self.round_trips += read[:1] == _READY
            del read[:size]


class Broker:
    """Answers requests about branches, and gives each consumer a message for each credit. It counts what it answers."""

    def __init__(self) -> None:
        self.requests = 0
        self._numbers = count(1)
        self._answers: SenderLink | None = None

    def __call__(self, connection: Connection, event: Any) -> None:
        match event:
            case Attached() if getattr(event.link.target, "dynamic", False):
                event.link.target.address = "temp.1"
                event.link.accept(target=event.link.target)
                event.link.flow(1)
            case Attached() if isinstance(event.link, SenderLink):
                event.link.accept()
                if event.link.source.address == "temp.1":
                    self._answers = event.link
            case DeclareReceived():
                event.link.settle(event.delivery_id, Declared(b"%d" % next(self._numbers)))
            case Transferred() if event.txn_id is not None:
                event.link.settle(event.delivery_id, TransactionalState(event.txn_id, ACCEPTED))
            case Transferred():
                self._answer(event)
            case Flowed() if isinstance(event.link, SenderLink):
                if event.link is not self._answers:
                    self._deliver(event.link)
            case _:
                obliging(connection, event)

    def _deliver(self, link: SenderLink) -> None:
        self.requests += link.credit > 0
        while link.credit:
            link.send(encode(Message("work")))
        link.drained()

    def _answer(self, event: Transferred) -> None:
        self.requests += 1
        request = decode_message(event.payload)
        assert self._answers is not None
        answer = Message(correlation_id=request.message_id, body="", properties={"xaCode": int(XA_OK), "statusCode": 200})
        self._answers.send(encode(answer), settled=True)


class Calls:
    """Counts the calls of Python functions in the application's thread, and in the threads that Bascule starts."""

    def __init__(self) -> None:
        self.codes: Counter[CodeType] = Counter()
        self.on = False
        self._application = threading.current_thread()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Look at all threads that are started within the block, and at this one."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and self.on and self._is_own():
            self.codes[frame.f_code] += 1

    def _is_own(self) -> bool:
        thread = threading.current_thread()
        return thread is self._application or thread.name.startswith("bascule-")

    def of(self, name: str) -> int:
        """Return the number of calls of a function, by its qualified name."""
        return sum(calls for code, calls in self.codes.items() if code.co_qualname == name)


def counted(kind: Kind, postgres: EmbeddedPostgres, directory: Path) -> Counts:
    """Run transactions of a kind, and return what one of them costs."""
    calls, broker = Calls(), Broker()
    with calls.installed(), ExitStack() as opened:
        proxy = opened.enter_context(closing(PostgresProxy(postgres.port)))
        url = opened.enter_context(server(broker)) if "jms" in kind.resources else ""
        conninfo = f"host=127.0.0.1 port={proxy.port} user=postgres dbname=postgres sslmode=disable gssencmode=disable"
        made: dict[str, Callable[[], Any]] = {
            "postgres": lambda: PostgresResource("postgres", conninfo, prepared=not kind.decides),
            "jms": lambda: JmsResource("jms", url),
        }
        resources = {name: opened.enter_context(closing(made[name]())) for name in kind.resources}
        manager = opened.enter_context(_manager(directory, resources))
        for number in range(FIRST + COUNTED):
            if number == FIRST:
                before = proxy.round_trips, broker.requests
                calls.on = True
            _transaction(manager, kind, resources)
        calls.on = False
        trips, requests = proxy.round_trips - before[0], broker.requests - before[1]
    writes = calls.of("ClientSocket.write_now") + calls.of("_SelectorSocketTransport.write")
    wakes = calls.of("BaseSelectorEventLoop._write_to_self")
    return Counts(*(each / COUNTED for each in (trips, requests, writes, wakes, calls.codes.total())), calls.codes)


def _manager(directory: Path, resources: dict[str, Any]) -> TransactionManager:
    """Return a manager whose recovery does nothing meanwhile."""
    return TransactionManager("counted", FileLog(directory / "log"), list(resources.values()), recovery_interval_s=3600)


def _transaction(manager: TransactionManager, kind: Kind, resources: dict[str, Any]) -> None:
    with manager.begin() as transaction:
        if kind.receives:
            assert transaction.enlist(resources["jms"]).consumer(QUEUE).receive(RECEIVE_S) is not None
        if "postgres" in resources:
            transaction.enlist(resources["postgres"]).execute(f"INSERT INTO {TABLE} VALUES (%s)", ("row",))
        if "jms" in resources:
            transaction.enlist(resources["jms"]).send(QUEUE, "sent")


def create_table(postgres: EmbeddedPostgres) -> None:
    """Create the table of the transactions."""
    with psycopg.connect(postgres.conninfo, autocommit=True) as database:
        database.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} (body text)")


def main() -> None:
    """Print the counts of each kind of transaction."""
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="bascule-counts-"))
        Path(directory).chmod(0o755)  # PostgreSQL does not run as root
        postgres = opened.enter_context(EmbeddedPostgres(Path(directory) / "postgres"))
        create_table(postgres)
        print("| transaction | PostgreSQL | broker | writes to the broker | wake-ups of the connection's thread | Python calls |")
        print("| --- | --- | --- | --- | --- | --- |")
        for number, kind in enumerate(KINDS):
            found = counted(kind, postgres, Path(directory) / str(number))
            figures = (found.postgres, found.broker, found.writes, found.wakes, found.calls)
            print(f"| {kind.name} | {' | '.join(f'{each:g}' for each in figures)} |", flush=True)
            if "--functions" in sys.argv:
                print(found.listed())


if __name__ == "__main__":
    main()
