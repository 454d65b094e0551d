"""A Django project for tests. A process has one project; its databases come and go by alias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.db import connections, models

if not settings.configured:
    settings.configure(DATABASES={}, USE_TZ=True, LOGGING_CONFIG=None)
    django.setup()


class Payment(models.Model):  # type: ignore[misc]  # Django has no types
    """A row of the tests."""

    item = models.TextField(unique=True)

    class Meta:
        """The options of a model without an application."""

        app_label = "shop"
        db_table = "django_payments"


def add(alias: str, **described: Any) -> None:
    """Add a database to the settings."""
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: described})[alias]


@contextmanager
def database(alias: str, **described: Any) -> Iterator[str]:
    """Add a database to the settings, with an empty table of payments. At the end the calling thread closes its connection."""
    add(alias, **described)
    try:
        with connections[alias].schema_editor() as editor:
            editor.create_model(Payment)
        yield alias
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Payment)
    finally:
        connections[alias].close()
        if hasattr(connections[alias], "close_pool"):
            connections[alias].close_pool()
        del connections[alias]
        del connections.settings[alias]


def items(alias: str) -> list[str]:
    """Return the committed items."""
    connection = connections.create_connection(alias)
    connection.ensure_connection()
    try:
        cursor = connection.connection.cursor()
        cursor.execute("SELECT item FROM django_payments ORDER BY id")
        return [row[0] for row in cursor.fetchall()]
    finally:
        connection.close()
