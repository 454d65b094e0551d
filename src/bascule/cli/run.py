"""Commands that serve: ``up``, ``broker``, ``pipelines``, ``kafka``."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bascule.cli.config import ConfigOption
from bascule.cli.kafka_access import with_own_access
from bascule.cli.log import LogFormatOption, LogLevelOption
from bascule.cli.log_reload import LogReload
from bascule.cli.login import configured_user
from bascule.cli.output import line
from bascule.core.environment import PIPELINES_NEED, inherited, is_of_lineage, is_setting
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.extras import require
from bascule.core.log import configure, get_log
from bascule.core.signals import StopSignals
from bascule.threads.hangup import hold_hangups
from bascule.threads.prompt_end import end_within

if TYPE_CHECKING:
    from bascule.config import Configuration, Settings
    from bascule.embedded.kafka import EmbeddedKafka
    from bascule.embedded.service_manager import ServiceManager
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
    typer.Option(
        "--user",
        metavar="NAME:file:PATH",
        help="Add a user who can connect, with the password in a file; may be repeated (broker.users)",
        show_default=False,
    ),
]

_log = get_log("bascule.up")


#: How long, in seconds, the pipelines may take to end in order, which needs Kafka. The next driver ends what is open, as after a kill.
#: systemd and Kubernetes kill a process after 30 to 90 seconds.
PIPELINES_END_S: Final = 15.0
#: The limit of bytes (RLIMIT_CORE) with which Linux neither writes a core dump nor starts a program that takes the dump.
NO_CORE_DUMP: Final = 1
#: What to do for a process of an installation that has no Kafka.
REMEDY: Final = "set it, or run `bascule up`, which starts its own Kafka"


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
    hold_hangups()
    require("broker")
    from bascule.config import load
    from bascule.embedded.process import HOST
    from bascule.embedded.protection import PLAIN_PORT, PORTS_FILE
    from bascule.embedded.service_manager import ServiceManager
    from bascule.server.supervisor import Supervisor, choose_ports

    manager = ServiceManager()

    flags = _flags(
        data_dir=data_dir, amqp_port=amqp_port, kafka_port=kafka_port, admin_port=admin_port, users=user,
        log_format=log_format, log_level=log_level,
    )  # fmt: skip
    if no_pipelines:
        flags["pipelines"] = {"enabled": False}
    read = partial(load, config, flags=flags)
    configuration = read()
    settings = configuration.settings
    configure(settings.log.values)
    if settings.pipelines.enabled:
        require("pipelines", "or start without pipelines: bascule up --no-pipelines")
    _keep_data_private()
    directory = settings.embedded.data_dir.absolute()
    with StopSignals(impatient=True) as stop, _only_one(directory):
        listeners = {
            "amqp": (settings.broker.port, "--amqp-port", settings.broker.host),
            "admin": (settings.admin.port, "--admin-port", settings.admin.host),
        }
        if settings.kafka.bootstrap_servers is None:
            listeners |= _kafka_listeners(settings)
        ports = choose_ports(directory / PORTS_FILE, listeners)
        bootstrap = settings.kafka.bootstrap_servers or f"{HOST}:{ports[PLAIN_PORT]}"
        supervisor = Supervisor(
            _parts(configuration, directory, ports), pids_file=directory / "pids.json", tell=_log.warning,
            service_manager=manager,
        )  # fmt: skip
        LogReload(configuration, read, manager, whole_process=False, behind=supervisor.hang_up).on_hangup()
        amqp, admin = _urls(settings, ports["amqp"], ports["admin"])
        ready = f"ready {amqp} kafka={bootstrap} admin={admin}"
        supervisor.run(stop, lambda: _report(manager, ready))


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
    hold_hangups()
    require("broker")
    from bascule.config import load

    flags = _flags(amqp_port=amqp_port, admin_port=admin_port, users=user, log_format=log_format, log_level=log_level)
    loaded = load(config, flags=flags)
    configure(loaded.settings.log.values)

    def complete(read: Configuration) -> Configuration:
        return dataclasses.replace(read, settings=with_own_access(read.settings, REMEDY))

    configuration = complete(loaded)
    settings = configuration.settings
    _keep_data_private()
    from bascule.embedded.service_manager import ServiceManager
    from bascule.server.node import run_broker
    from bascule.server.reload import ReloadSource

    def say(state: str, *ports: int) -> None:
        line("{} {} admin={}".format(state, *_urls(settings, *ports)))

    run_broker(
        settings, on_ready=partial(say, "ready"), on_standby=partial(say, "standby"), service_manager=ServiceManager(),
        reload_source=ReloadSource(configuration, lambda: complete(load(config, flags=flags))),
    )  # fmt: skip


def pipelines(config: ConfigOption = None, log_format: LogFormatOption = None, log_level: LogLevelOption = None) -> None:
    """Run the Spark driver with all diverts and ingresses, with an existing Kafka (`kafka.bootstrap_servers`).

    Print `ready pipelines=N` when they run. While another driver of the same bridge (`bridge.id`) runs them, print `standby pipelines=N`
    and wait. With N = 0, Spark is not started, unless removed diverts have left messages.
    """
    hold_hangups()
    from bascule.config import load

    read = partial(load, config, flags=_flags(log_format=log_format, log_level=log_level), needs=PIPELINES_NEED)
    configuration = read()
    configure(configuration.settings.log.values)
    settings = with_own_access(configuration.settings, REMEDY)
    for name in list(filter(is_setting, os.environ)):
        del os.environ[name]  # Spark and transformations would inherit them
    _keep_data_private()
    from bascule.embedded.service_manager import ServiceManager
    from bascule.pipelines.driver import run

    manager = ServiceManager()
    count = sum(pipeline.enabled for pipeline in (*settings.divert, *settings.ingress))
    ready, standby = (partial(_report, manager, f"{role} pipelines={count}") for role in ("ready", "standby"))
    LogReload(configuration, read, manager).on_hangup()
    end_within(PIPELINES_END_S)
    run(settings, on_ready=ready, on_standby=standby, service_manager=manager)


def kafka(config: ConfigOption = None, data_dir: DataDirOption = None, kafka_port: KafkaPortOption = None) -> None:
    """Run the embedded Kafka alone, with the data of `bascule up` in the data directory.

    Print `ready kafka=HOST:PORT` when it serves.
    """
    hold_hangups()
    require("broker")
    from bascule.config import load
    from bascule.embedded.protection import PORTS_FILE
    from bascule.embedded.service_manager import NO_SERVICE_MANAGER
    from bascule.server.supervisor import choose_ports

    read = partial(load, config, flags=_flags(data_dir=data_dir, kafka_port=kafka_port))
    configuration = read()
    settings = configuration.settings
    configure(settings.log.values)
    _keep_data_private()
    directory = settings.embedded.data_dir.absolute()
    with StopSignals(impatient=True) as stop, _only_one(directory):
        LogReload(configuration, read, NO_SERVICE_MANAGER, whole_process=False).on_hangup()
        ports = choose_ports(directory / PORTS_FILE, _kafka_listeners(settings))
        node = _embedded_kafka(settings, directory, ports)
        try:
            node.start()
            line(f"ready kafka={node.bootstrap}")
            while not stop.wait(0.2):
                if not node.running:
                    raise Unavailable(f"kafka ended; see {node.log_file}")
        finally:
            node.stop()


def _report(manager: ServiceManager, text: str) -> None:
    """Report that the process is ready: to the service manager, and on standard output."""
    manager.ready(text)
    line(text)


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
        ("broker", "users", dict(map(configured_user, users)) if users else None),
        ("log", "format", log_format),
        ("log", "level", log_level),
    ):
        if value is not None:
            tree.setdefault(section, {})[key] = value
    return tree


def _parts(configuration: Configuration, directory: Path, ports: dict[str, int]) -> list[Part]:
    from bascule.config.private_file import make_private
    from bascule.server.supervisor import CommandPart, KafkaPart

    settings = configuration.settings
    env = _environment(configuration, directory, ports)
    logs = directory / "logs"
    make_private(logs)
    parts: list[Part] = []
    if settings.kafka.bootstrap_servers is None:
        parts.append(KafkaPart(_embedded_kafka(settings, directory, ports)))
    names = ("broker", "pipelines") if settings.pipelines.enabled else ("broker",)
    for name in names:
        given, added = (inherited(each, PIPELINES_NEED) for each in (os.environ, env))
        if name == "broker":
            given, added = {each: value for each, value in os.environ.items() if not is_of_lineage(each)}, env
        command = [sys.executable, "-m", "bascule.cli", name]
        parts.append(CommandPart(name, command, log_file=logs / f"{name}.log", inherited=given, env=added))
    return parts


def _environment(configuration: Configuration, directory: Path, ports: dict[str, int]) -> dict[str, str]:
    """Return environment variables that pass the decisions made here to the parts. Other users cannot read them, unlike a command line."""
    from bascule.embedded.process import HOST
    from bascule.embedded.protection import DIRECTORY, OWN_PORT, client_login

    settings = configuration.settings
    bootstrap, client = settings.kafka.bootstrap_servers, {}
    if bootstrap is None:
        bootstrap, client = f"{HOST}:{ports[OWN_PORT]}", client_login(directory / DIRECTORY)
    env = {"BASCULE_KAFKA__BOOTSTRAP_SERVERS": bootstrap}
    if settings.pipelines.instance is None:
        env["BASCULE_PIPELINES__INSTANCE"] = settings.instance
    # A reload of the broker must find new values in the file, to say that they need a restart: only chosen ports and flags are passed on.
    flags = partial(configuration.overriding, sources=1)
    if flags("embedded", "data_dir") is not None:
        env["BASCULE_EMBEDDED__DATA_DIR"] = str(settings.embedded.data_dir)
    for section, name, port in (("broker", "amqp", settings.broker.port), ("admin", "admin", settings.admin.port)):
        if port == 0 or flags(section, "port") is not None:
            env[f"BASCULE_{section.upper()}__PORT"] = str(ports[name])
    # A reload of the parts must find a new level in the file, so only a flag is passed on.
    env |= {f"BASCULE_LOG__{key.upper()}": value for key, value in (configuration.overriding("log", sources=1) or {}).items()}
    env |= {f"BASCULE_KAFKA__CLIENT__{name.replace('.', '_').upper()}": value for name, value in client.items()}
    if flagged := configuration.overriding("broker", "users"):
        env["BASCULE_BROKER__USERS"] = json.dumps(flagged)
    return env | ({"BASCULE_CONFIG": str(configuration.file)} if configuration.file else {})


def _keep_data_private() -> None:
    """Let this process and its children create files that only their owner may read, and write no core dumps.

    Logs, messages and positions are in the files, secrets and messages in a core dump. The hard limit stays, so that
    ``prlimit --core=unlimited --pid PID`` permits a dump for an analysis.
    """
    from bascule.config.private_file import PRIVATE_UMASK

    os.umask(PRIVATE_UMASK)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    # If core_pattern names a program, Linux ignores the limit 0 and starts the program, but not with the limit 1 (core(5), fs/coredump.c).
    # A file of one byte cannot be a core dump. With the hard limit 0, nobody can set 1.
    resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE_DUMP if hard else 0, hard))


def _kafka_listeners(settings: Settings) -> dict[str, tuple[int, str, str]]:
    """Return the listeners of the embedded Kafka, for ``choose_ports``. Bascule's own one has no setting, and so any free port."""
    from bascule.embedded.process import HOST
    from bascule.embedded.protection import OWN_PORT, PLAIN_PORT

    return {PLAIN_PORT: (settings.embedded.port, "--kafka-port", HOST), OWN_PORT: (0, "--kafka-port", HOST)}


def _embedded_kafka(settings: Settings, directory: Path, ports: dict[str, int]) -> EmbeddedKafka:
    from bascule.embedded.kafka import EmbeddedKafka
    from bascule.embedded.protection import DIRECTORY, OWN_PORT, PLAIN_PORT, Protection
    from bascule.kafka.acls import own_names

    names = own_names(settings.journal_topics, settings.bridge.id)
    return EmbeddedKafka(
        directory / DIRECTORY, port=ports[PLAIN_PORT], fsync=settings.embedded.fsync, heap_mb=settings.embedded.heap_mb,
        jvm_options=settings.embedded.jvm_options, protection=Protection(directory / DIRECTORY, ports[OWN_PORT], names),
    )  # fmt: skip


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Lock the directory for this process. The kernel releases the lock when the process ends, however it ends."""
    from bascule.config.private_file import PRIVATE_DIRECTORY, readable_by_others

    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        if readable_by_others(directory):
            _log.warning("data directory is open to other users", directory=str(directory), remedy="chmod 700")
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise InvalidInput(f"the data directory {directory} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"{directory} is in use by another `bascule up` or `bascule kafka`; choose another with --data-dir") from None
        yield
