"""Logging of the product: an event, and fields with its circumstances, through the logging of the standard library.

    log = get_log(__name__)
    log.warning("divert paused", divert=name, reason="unknown_divert")

A module of the product logs through ``get_log``. A handler that knows nothing of Bascule gets the text ``divert paused divert=delayed
reason=unknown_divert``; the handler of ``configure`` writes that text, or the event and the fields as JSON. Only commands of the product
call ``configure``: in a user's program the adapter, the client and the transaction manager leave the set-up to the program.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

#: Root of the names of the product's loggers.
PRODUCT: Final = "bascule"
#: Characters of a value that can stand without quotes.
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.,:;/+*@#$%&()[]{}<>?!~^|'")


#: How a log line is written, and the least severity that is written.
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What ``configure`` needs; the driver passes it on to its Python workers."""

    format: LogFormat = "text"
    level: LogLevel = "info"


class LogEvent:
    """The message of a log record: what happened, and the fields."""

    __slots__ = ("fields", "text")

    def __init__(self, text: str, fields: Mapping[str, object]) -> None:
        self.text = text
        self.fields = fields

    def __str__(self) -> str:
        """The event, then ``name=value`` for each field."""
        return " ".join([self.text, *(f"{name}={_shown(value)}" for name, value in self.fields.items())])


class EventLog:
    """A logger of the product. ``event`` is a constant text in plain words; all data are ``fields``."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        """Something that only a developer of Bascule needs to know."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """A change of state that an operator may want to know."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, *, exc_info: Any = None, **fields: object) -> None:
        """Something that needs attention and does not stop anything."""
        self._write(logging.WARNING, event, fields, exc_info)

    def error(self, event: str, /, *, exc_info: Any = None, **fields: object) -> None:
        """Something has stopped or is lost."""
        self._write(logging.ERROR, event, fields, exc_info)

    def exception(self, event: str, /, **fields: object) -> None:
        """As ``error``, with the exception that is being handled."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def critical(self, event: str, /, *, exc_info: Any = None, **fields: object) -> None:
        """The process, or a part of it, ends."""
        self._write(logging.CRITICAL, event, fields, exc_info)

    def _write(self, level: int, event: str, fields: Mapping[str, object], exc_info: Any = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, LogEvent(event, fields), exc_info=exc_info, stacklevel=3)


def get_log(name: str) -> EventLog:
    """The logger of a module: ``get_log(__name__)``."""
    return EventLog(name)


class ClientLog:
    """For ``logger`` of a Kafka client: its log lines are written at level DEBUG, since Bascule reports failures of Kafka itself."""

    __slots__ = ("_log",)

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def log(self, _level: int, text: str, *arguments: object) -> None:
        """What the client calls."""
        self._log.debug("Kafka client", text=text % arguments if arguments else text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, event, the fields, and the exception with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See Formatter."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, LogEvent):
            said |= {"event": record.msg.text}
            said |= {f"{name}_" if name in said else name: _plain(value) for name, value in record.msg.fields.items()}
        else:
            said["event"] = record.getMessage()
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


#: What ``configure`` was given in this process.
_configured: LogSettings | None = None


def configured() -> LogSettings | None:
    """The settings of this process's log; None where Bascule has not set it up."""
    return _configured


def configure(settings: LogSettings = LogSettings(), stream: TextIO | None = None) -> None:
    """Write all log records of this process to standard error, or to ``stream``. A second call replaces the first.

    Loggers of other libraries write from WARNING on, or from ``settings.level`` where that is higher.
    """
    global _configured
    _configured = settings
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else logging.Formatter(TEXT_FORMAT))
    root = logging.getLogger()
    for before in root.handlers[:]:
        root.removeHandler(before)
    root.addHandler(handler)
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger(PRODUCT).setLevel(level)


def _plain(value: object) -> object:
    """A tuple with a text of its own, such as a transaction's id, is that text, and no array."""
    return str(value) if isinstance(value, tuple) and type(value) is not tuple else value


def _shown(value: object) -> str:
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=not text.isprintable())
