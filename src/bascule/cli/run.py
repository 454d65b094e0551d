"""Commands that serve: ``up``, ``broker``, ``pipelines``, ``kafka``."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.log import LogFormatOption, LogLevelOption
from bascule.cli.output import line
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.extras import require
from bascule.core.log import configure, get_log
from bascule.core.signals import StopSignals

if TYPE_CHECKING:
    from bascule.config import Configuration, Settings
    from bascule.server.supervisor import Part

DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Directory for all local data (default: embedded.data_dir, bascule-data)", show_default=False),
]
AmqpPortOption = Annotated[
    int | None, typer.Option("--amqp-port", help="Port for JMS clients; 0 = any free port (default: broker.port, 5672)", show_default=False)
]
KafkaPortOption = Annotated[
    int | None,
    typer.Option("--kafka-port", help="Port of the embedded Kafka; 0 = any free port (default: embedded.port, 9092)", show_default=False),
]
AdminPortOption = Annotated[
    int | None,
    typer.Option(
        "--admin-port", help="Port for health checks, status and metrics; 0 = any free port (default: admin.port, 8672)", show_default=False
    ),
]
UserOption = Annotated[
    list[str] | None,
    typer.Option("--user", metavar="NAME:PASSWORD", help="Add a user who can connect; may be repeated (broker.users)", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(epilog="Example:  bascule up --config bascule.toml --data-dir bascule-data --amqp-port 0")(up)
    app.command(epilog="Example:  BASCULE_KAFKA__BOOTSTRAP_SERVERS=kafka1:9092 bascule broker --config bascule.toml")(broker)
    app.command(epilog="Example:  BASCULE_KAFKA__BOOTSTRAP_SERVERS=kafka1:9092 bascule pipelines --config bascule.toml")(pipelines)
    app.command(epilog="Example:  bascule kafka --data-dir bascule-data --kafka-port 9092")(kafka)


def up(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    amqp_port: AmqpPortOption = None,
    kafka_port: KafkaPortOption = None,
    admin_port: AdminPortOption = None,
    no_pipelines: Annotated[bool, typer.Option("--no-pipelines", help="Run only the broker and Kafka (pipelines.enabled = false)")] = False,
    user: UserOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run everything on this machine: the embedded Kafka (unless `kafka.bootstrap_servers` is set), the broker and the pipelines.

    When all parts are ready, print one line: `ready amqp://HOST:PORT kafka=HOST:PORT admin=http://HOST:PORT`. Run until SIGTERM or Ctrl-C,
    and restart a part that dies. The data directory has the process ids (pids.json), the ports (ports.json) and the logs of the parts
    (logs/).
    """
    require("broker")
    from bascule.config import load
    from bascule.server.supervisor import Supervisor, choose_ports

    flags = _flags(
        data_dir=data_dir, amqp_port=amqp_port, kafka_port=kafka_port, admin_port=admin_port, users=user,
        log_format=log_format, log_level=log_level,
    )  # fmt: skip
    if no_pipelines:
        flags["pipelines"] = {"enabled": False}
    configuration = load(config, flags=flags)
    settings = configuration.settings
    configure(settings.log.values)
    if settings.pipelines.enabled:
        require("pipelines", "or start without pipelines: bascule up --no-pipelines")
    directory = settings.embedded.data_dir.absolute()
    with StopSignals(impatient=True) as stop, _only_one(directory):
        listeners = {
            "amqp": (settings.broker.port, "--amqp-port", settings.broker.host),
            "admin": (settings.admin.port, "--admin-port", settings.admin.host),
        }
        if settings.kafka.bootstrap_servers is None:
            listeners["kafka"] = (settings.embedded.port, "--kafka-port", "127.0.0.1")
        ports = choose_ports(directory / "ports.json", listeners)
        bootstrap = settings.kafka.bootstrap_servers or f"127.0.0.1:{ports['kafka']}"
        supervisor = Supervisor(
            _parts(configuration, directory, ports, bootstrap), pids_file=directory / "pids.json", tell=get_log("bascule.up").warning
        )
        amqp, admin = _urls(settings, ports["amqp"], ports["admin"])
        supervisor.run(stop, lambda: line(f"ready {amqp} kafka={bootstrap} admin={admin}"))


def broker(
    config: ConfigOption = None,
    amqp_port: AmqpPortOption = None,
    admin_port: AdminPortOption = None,
    user: UserOption = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run the broker alone, with an existing Kafka (`kafka.bootstrap_servers`).

    When the broker serves, print `ready amqp://HOST:PORT admin=http://HOST:PORT`. If several brokers use one Kafka, one of them serves.
    Each other broker is a standby: it prints `standby amqp://HOST:PORT admin=http://HOST:PORT`, follows the journal, and prints `ready ...`
    when it takes over.
    """
    require("broker")
    from bascule.config import load

    flags = _flags(amqp_port=amqp_port, admin_port=admin_port, users=user, log_format=log_format, log_level=log_level)
    settings = load(config, flags=flags).settings
    configure(settings.log.values)
    _need_kafka(settings)
    from bascule.server.node import run_broker

    def say(state: str, *ports: int) -> None:
        line("{} {} admin={}".format(state, *_urls(settings, *ports)))

    run_broker(settings, on_ready=partial(say, "ready"), on_standby=partial(say, "standby"))


def pipelines(config: ConfigOption = None, log_format: LogFormatOption = None, log_level: LogLevelOption = None) -> None:
    """Run the Spark driver with all diverts and ingresses, with an existing Kafka (`kafka.bootstrap_servers`).

    Print `ready pipelines=N` when they run. While another driver of the same bridge (`bridge.id`) runs them, print `standby pipelines=N`
    and wait. With N = 0, Spark is not started, unless removed diverts have left messages.
    """
    from bascule.config import load

    settings = load(config, flags=_flags(log_format=log_format, log_level=log_level)).settings
    configure(settings.log.values)
    _need_kafka(settings)
    from bascule.pipelines.driver import run

    count = sum(pipeline.enabled for pipeline in (*settings.divert, *settings.ingress))
    run(settings, on_ready=lambda: line(f"ready pipelines={count}"), on_standby=lambda: line(f"standby pipelines={count}"))


def kafka(config: ConfigOption = None, data_dir: DataDirOption = None, kafka_port: KafkaPortOption = None) -> None:
    """Run the embedded Kafka alone, with the data of `bascule up` in the data directory.

    Print `ready kafka=HOST:PORT` when it serves.
    """
    from bascule.config import load

    settings = load(config, flags=_flags(data_dir=data_dir, kafka_port=kafka_port)).settings
    configure(settings.log.values)
    directory = settings.embedded.data_dir.absolute()
    with StopSignals(impatient=True) as stop, _only_one(directory):
        node = _embedded_kafka(settings, directory, settings.embedded.port)
        try:
            node.start()
            line(f"ready kafka={node.bootstrap}")
            while not stop.wait(0.2):
                if not node.running:
                    raise Unavailable(f"kafka ended; see {node.log_file}")
        finally:
            node.stop()


def _urls(settings: Settings, amqp_port: int, admin_port: int) -> tuple[str, str]:
    """Return the URL for clients and the URL of the admin server."""
    broker, admin = settings.broker, settings.admin
    return f"{broker.url_scheme}://{broker.host}:{amqp_port}", f"{admin.url_scheme}://{admin.host}:{admin_port}"


def _flags(
    *,
    data_dir: Path | None = None,
    amqp_port: int | None = None,
    kafka_port: int | None = None,
    admin_port: int | None = None,
    users: list[str] | None = None,
    log_format: str | None = None,
    log_level: str | None = None,
) -> dict[str, Any]:
    """Return the given flags as a tree of settings."""
    tree: dict[str, dict[str, Any]] = {}
    for section, key, value in (
        ("embedded", "data_dir", data_dir),
        ("embedded", "port", kafka_port),
        ("broker", "port", amqp_port),
        ("admin", "port", admin_port),
        ("broker", "users", dict(map(_user, users)) if users else None),
        ("log", "format", log_format),
        ("log", "level", log_level),
    ):
        if value is not None:
            tree.setdefault(section, {})[key] = value
    return tree


def _user(text: str) -> tuple[str, str]:
    name, colon, password = text.partition(":")
    if not (name and colon and password):
        raise InvalidInput(f"--user {name!r}...: must be NAME:PASSWORD")
    return name, password


def _parts(configuration: Configuration, directory: Path, ports: dict[str, int], bootstrap: str) -> list[Part]:
    from bascule.server.supervisor import CommandPart, KafkaPart

    settings = configuration.settings
    env = _environment(configuration, ports, bootstrap)
    logs = directory / "logs"
    parts: list[Part] = []
    if settings.kafka.bootstrap_servers is None:
        parts.append(KafkaPart(_embedded_kafka(settings, directory, ports["kafka"])))
    names = ("broker", "pipelines") if settings.pipelines.enabled else ("broker",)
    parts += [CommandPart(name, [sys.executable, "-m", "bascule.cli", name], log_file=logs / f"{name}.log", env=env) for name in names]
    return parts


def _environment(configuration: Configuration, ports: dict[str, int], bootstrap: str) -> dict[str, str]:
    """Return environment variables that pass the decisions made here to the parts. Other users cannot read them, unlike a command line."""
    settings = configuration.settings
    env = {
        "BASCULE_BROKER__PORT": str(ports["amqp"]),
        "BASCULE_ADMIN__PORT": str(ports["admin"]),
        "BASCULE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "BASCULE_EMBEDDED__DATA_DIR": str(settings.embedded.data_dir),
        "BASCULE_BROKER__USERS": json.dumps(settings.broker.passwords),
        "BASCULE_LOG__FORMAT": settings.log.format,
        "BASCULE_LOG__LEVEL": settings.log.level,
    }
    return env | ({"BASCULE_CONFIG": str(configuration.file)} if configuration.file else {})


def _embedded_kafka(settings: Settings, directory: Path, port: int) -> Any:
    from bascule.embedded.kafka import EmbeddedKafka

    return EmbeddedKafka(directory / "kafka", port=port, fsync=settings.embedded.fsync, heap_mb=settings.embedded.heap_mb)


def _need_kafka(settings: Settings) -> None:
    if settings.kafka.bootstrap_servers is None:
        raise InvalidInput("kafka.bootstrap_servers is not set; set it, or run `bascule up`, which starts its own Kafka")


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Lock the directory for this process. The kernel releases the lock when the process ends, however it ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise InvalidInput(f"the data directory {directory} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"{directory} is in use by another `bascule up` or `bascule kafka`; choose another with --data-dir") from None
        yield
