"""The C functions of librdkafka, from the library of the installed Kafka client."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

ERROR_BYTES: Final = 512


@cache
def library() -> ctypes.CDLL:
    """Load the library."""
    spec = importlib.util.find_spec("confluent_kafka")
    if spec is None or spec.origin is None:
        raise ImportError("confluent_kafka is not installed")
    bundled = sorted((Path(spec.origin).parents[1] / "confluent_kafka.libs").glob("librdkafka*"))
    loaded = ctypes.CDLL(str(bundled[0]) if bundled else "librdkafka.so.1")
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return loaded


def refused(settings: Mapping[str, Any]) -> str:
    """Return why librdkafka refuses the settings of a client; "" if it accepts them.

    Functions belong to the Python client and are ignored.
    """
    loaded, error = library(), ctypes.create_string_buffer(ERROR_BYTES)
    conf = ctypes.c_void_p(loaded.rd_kafka_conf_new())
    try:
        for name, value in settings.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if not callable(value) and loaded.rd_kafka_conf_set(conf, name.encode(), text.encode(), error, ERROR_BYTES):
                return error.value.decode()
        return ""
    finally:
        loaded.rd_kafka_conf_destroy(conf)
