"""The base of every table of the settings, types of values, and their checks."""

from __future__ import annotations

import ipaddress
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_core import PydanticCustomError

from bascule.core.destination import ADDRESS_MAX
from bascule.core.environment import CREDENTIALS_VARIABLE

#: Kafka's limit on the length of a topic name.
TOPIC_NAME_MAX = 249
#: Names are parts of Kafka topic names, group ids and transactional ids; their length is one byte in the journal.
NAME_MAX = 100

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_DOLLAR = re.compile(r"\$(?:\{([^}]*)\})?")
_PROPERTY = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
#: The last ones are for a variable of OpenTelemetry in ``spark.executorEnv``, and for texts that may have secrets among others: one of
#: librdkafka, and the options of a JVM.
_SECRET_KEY = re.compile(
    r"pass(word|phrase|wd)|secret|jaas|\.pem$|token|credential|(access|account|api|private)[._-]?key|_headers$"
    r"|oauthbearer\.config$|javaoptions$|java(_tool)?_options$|\.sas\."
)


def is_secret(key: str) -> bool:
    """Return whether the value of a Kafka or Spark setting must never be shown."""
    return _SECRET_KEY.search(key.lower()) is not None


def read_secret(value: str) -> str:
    """Return a secret, or the content of the file that ``file:PATH`` or ``credential:NAME`` names, without its last line breaks.

    A credential is a file that systemd gives a service (``LoadCredential=``). Raises ValueError.
    """
    kind, colon, name = value.partition(":")
    if not colon or kind not in ("file", "credential"):
        return value
    path = Path(name) if kind == "file" else _credential(name)
    try:
        secret = path.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start})") from error
    if not secret:
        raise ValueError(f"{path} is empty")
    return secret


def read_secrets(values: dict[str, ClientSetting]) -> dict[str, ClientSetting]:
    """Return settings of Kafka or Spark; those whose names indicate a secret are read as by ``read_secret``. Raises ValueError."""
    return {key: read_secret(value) if isinstance(value, str) and is_secret(key) else value for key, value in values.items()}


def _credential(name: str) -> Path:
    directory = os.environ.get(CREDENTIALS_VARIABLE)
    if directory is None:
        raise ValueError(f"credential {name!r}: {CREDENTIALS_VARIABLE} is not set; use LoadCredential={name}:PATH in the unit of systemd")
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"credential {name!r}: must be the name of a credential, not a path")
    return Path(directory, name)


def _name(value: str) -> str:
    if not _NAME.fullmatch(value) or len(value) > NAME_MAX:
        raise ValueError(f"must be 1 to {NAME_MAX} letters, digits, '.', '_' and '-', the first a letter or digit")
    return value


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT")
    return value


def _host_ports(values: tuple[str, ...]) -> tuple[str, ...]:
    for each in values:
        _host_port(each)
    return values


def check_topic(value: str) -> str:
    """Return a valid name of a Kafka topic. Raises ValueError."""
    if not _TOPIC.fullmatch(value) or len(value) > TOPIC_NAME_MAX or value in {".", ".."}:
        raise ValueError(f"must be a Kafka topic name: 1 to {TOPIC_NAME_MAX} letters, digits, '.', '_' and '-'")
    return value


def check_pattern(value: str) -> str:
    """Return an address or a pattern of addresses. Raises ValueError."""
    for word in value.split("."):
        if not word or (len(word) > 1 and ("*" in word or "#" in word)):
            raise ValueError("words must be separated by dots; '*' and '#' must stand for whole words")
    return value


def check_template(template: str, *placeholders: str) -> str:
    """Return a template that uses only the given placeholders; ``header:NAME`` stands for any header. Raises ValueError."""
    known = " and ".join(f"${{{placeholder}}}" for placeholder in placeholders) + (" are" if len(placeholders) > 1 else " is")
    if not template:
        raise ValueError(f"must not be empty; {known} replaced")
    for match in _DOLLAR.finditer(template):
        kind, colon, name = (match[1] or "").partition(":")
        if (f"{kind}:NAME" if colon and name else kind) not in placeholders:
            raise ValueError(f"{template[match.start() :]!r} is not a placeholder: only {known} replaced")
    return template


def _start(value: object) -> str:
    if isinstance(value, datetime):  # TOML has its own timestamp type
        return value.isoformat()
    try:
        if value not in ("earliest", "latest"):
            datetime.fromisoformat(value)  # type: ignore[arg-type]  # what is no text is refused just as well
    except (TypeError, ValueError):
        raise ValueError("must be 'earliest', 'latest' or a timestamp such as '2026-01-31T08:00:00Z'") from None
    return str(value)


def check_key(value: str, words: tuple[str, ...]) -> str:
    """Return one of ``words``, or ``property:NAME``. Raises ValueError."""
    kind, colon, name = value.partition(":")
    if value in words or (kind == "property" and colon and _PROPERTY.fullmatch(name)):
        return value
    raise ValueError(f"must be {', '.join(words)} or property:NAME")


def check_secret(value: str) -> str:
    """Return a password or token as ``read_secret`` does. Raises ValueError, also for an empty one, which everybody knows."""
    if not value:
        raise ValueError("must not be empty; leave the setting out if there is no secret")
    return read_secret(value)


def _secret(value: SecretStr) -> SecretStr:
    return SecretStr(check_secret(value.get_secret_value()))


Name = Annotated[str, AfterValidator(_name)]
TopicName = Annotated[str, AfterValidator(check_topic)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
Start = Annotated[str, BeforeValidator(_start)]
Port = Annotated[int, Field(ge=0, le=65535)]
Pattern = Annotated[str, Field(max_length=ADDRESS_MAX), AfterValidator(check_pattern)]
HostPort = Annotated[str, AfterValidator(_host_port)]
HostPorts = Annotated[tuple[str, ...], AfterValidator(_host_ports)]
ClientSetting = bool | int | float | str
ClientSettings = Annotated[dict[str, ClientSetting], AfterValidator(read_secrets)]


class Section(BaseModel):
    """A table of the file."""

    # TOML knows `inf` and `nan`, which no count of milliseconds can be.
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, validate_default=True, allow_inf_nan=False)

    #: Whether missing settings are left to other tables, so that the defaults of this table are no values.
    shows_only_given: ClassVar[bool] = False


def located(path: tuple[str | int, ...], message: str) -> PydanticCustomError:
    """Return an error about a value that can only be checked with the whole tree."""
    return PydanticCustomError("setting", "{message}", {"message": message, "path": path})
