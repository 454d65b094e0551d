"""Logging of the product: an event and key=value fields, through the logging of the standard library.

    log = get_log(__name__)
    log.warning("divert paused", divert=name, reason="unknown_divert")

Modules of the product log through ``get_log``. A handler of another program gets the text ``divert paused divert=delayed
reason=unknown_divert``; the handler of ``configure`` writes that text, or the event and the fields as JSON. Only commands of the product
call ``configure``: in a user's program the adapter, the client and the transaction manager do not configure logging.
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
#: Characters of values that need no quotes.
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.,:;/+*@#$%&()[]{}<>?!~^|'")


#: The format of log lines and the minimum severity.
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of ``configure``; the driver passes them to its Python workers."""

    format: LogFormat = "text"
    level: LogLevel = "info"


class LogEvent:
    """The message of a log record: the event and its fields."""

    __slots__ = ("fields", "text")

    def __init__(self, text: str, fields: Mapping[str, object]) -> None:
        self.text = text
        self.fields = fields

    def __str__(self) -> str:
        """Return the event, then ``name=value`` for each field."""
        return " ".join([self.text, *(f"{name}={_shown(value)}" for name, value in self.fields.items())])


class EventLog:
    """A logger of the product. ``event`` is a constant text in plain words; all data are ``fields``."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log a detail for developers of Bascule."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log a change of state that may interest an operator."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, *, exc_info: Any = None, **fields: object) -> None:
        """Log a problem that stops nothing."""
        self._write(logging.WARNING, event, fields, exc_info)

    def error(self, event: str, /, *, exc_info: Any = None, **fields: object) -> None:
        """Log that something has stopped or is lost."""
        self._write(logging.ERROR, event, fields, exc_info)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log at level ERROR with the exception that is being handled."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def critical(self, event: str, /, *, exc_info: Any = None, **fields: object) -> None:
        """Log the end of the process or of a part of it."""
        self._write(logging.CRITICAL, event, fields, exc_info)

    def _write(self, level: int, event: str, fields: Mapping[str, object], exc_info: Any = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, LogEvent(event, fields), exc_info=exc_info, stacklevel=3)


def get_log(name: str) -> EventLog:
    """Return the logger of a module: ``get_log(__name__)``."""
    return EventLog(name)


class ClientLog:
    """The ``logger`` of a Kafka client: writes its log lines at level DEBUG, because Bascule reports failures of Kafka itself."""

    __slots__ = ("_log",)

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def log(self, _level: int, text: str, *arguments: object) -> None:
        """Write a log line of the client."""
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


#: The settings passed to ``configure`` in this process.
_configured: LogSettings | None = None


def configured() -> LogSettings | None:
    """Return the log settings of this process; None if Bascule has not configured logging."""
    return _configured


def configure(settings: LogSettings = LogSettings(), stream: TextIO | None = None) -> None:
    """Write all log records of this process to standard error, or to ``stream``. A second call replaces the first.

    Loggers of other libraries write from WARNING on, or from ``settings.level`` if that is higher.
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
    """Return a tuple that has its own text form, such as a transaction id, as that text."""
    return str(value) if isinstance(value, tuple) and type(value) is not tuple else value


def _shown(value: object) -> str:
    text = str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=not text.isprintable())
