"""A producer whose delivery reports are read without a thread: librdkafka writes to a file descriptor when reports are waiting.

confluent-kafka has no call for this (``rd_kafka_queue_io_event_enable``). The producer calls the C functions of the librdkafka with which
confluent-kafka is linked. It uses only public functions and the public struct ``rd_kafka_message_t`` of ``rdkafka.h``, which all libraries
named ``librdkafka.so.1`` share, and no internals of confluent-kafka. If a function is missing, ``available`` returns False.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, cimpl

_PRODUCER: Final = 0
_ERROR_BYTES: Final = 512
#: Kinds of events.
_DELIVERY: Final = 0x1
_ERROR: Final = 0x8
#: The client copies key and value.
_COPY: Final = 0x2
#: Records that wait and records in flight are dropped, without a wait for the connections.
_PURGE_ALL: Final = 0x1 | 0x2 | 0x4
#: Records of at least this size, in bytes, are copied without the interpreter lock. Below, taking the lock again would take longer.
_UNLOCKED_COPY_BYTES: Final = 64 << 10
#: What librdkafka writes to an eventfd.
_ONE: Final = (1).to_bytes(8, "little")


class _Message(ctypes.Structure):
    """``rd_kafka_message_t``."""

    _fields_ = (
        ("error", c_int),
        ("topic", c_void_p),
        ("partition", c_int32),
        ("value", c_void_p),
        ("value_bytes", c_size_t),
        ("key", c_void_p),
        ("key_bytes", c_size_t),
        ("offset", c_int64),
        ("private", c_void_p),
    )


class _Library:
    """The functions of librdkafka. Raises OSError or AttributeError if one of them is missing."""

    def __init__(self, path: str) -> None:
        # A handle of an extension module finds the symbols of the libraries with which the module is linked.
        unlocked, locked = ctypes.CDLL(path), ctypes.PyDLL(path)

        def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
            found = library[name]
            found.restype, found.argtypes = result, arguments
            return found

        text = (c_char_p, c_size_t)
        produce = (c_int, c_void_p, c_int32, c_int, c_char_p, c_size_t, c_char_p, c_size_t, c_void_p)
        self.conf_new = function(unlocked, "rd_kafka_conf_new", c_void_p)
        self.conf_destroy = function(unlocked, "rd_kafka_conf_destroy", None, c_void_p)
        self.conf_set = function(unlocked, "rd_kafka_conf_set", c_int, c_void_p, c_char_p, c_char_p, *text)
        self.conf_set_events = function(unlocked, "rd_kafka_conf_set_events", None, c_void_p, c_int)
        self.new = function(unlocked, "rd_kafka_new", c_void_p, c_int, c_void_p, *text)
        self.topic_new = function(unlocked, "rd_kafka_topic_new", c_void_p, c_void_p, c_char_p, c_void_p)
        self.topic_destroy = function(unlocked, "rd_kafka_topic_destroy", None, c_void_p)
        self.queue_of = function(unlocked, "rd_kafka_queue_get_main", c_void_p, c_void_p)
        self.queue_destroy = function(unlocked, "rd_kafka_queue_destroy", None, c_void_p)
        self.io_events = function(unlocked, "rd_kafka_queue_io_event_enable", None, c_void_p, c_int, c_char_p, c_size_t)
        self.purge = function(unlocked, "rd_kafka_purge", c_int, c_void_p, c_int)
        self.destroy = function(unlocked, "rd_kafka_destroy", None, c_void_p)
        self.unreported = function(unlocked, "rd_kafka_outq_len", c_int, c_void_p)
        self.fatal_error = function(unlocked, "rd_kafka_fatal_error", c_int, c_void_p, *text)
        self.produce_large = function(unlocked, "rd_kafka_produce", *produce)
        # These calls do not wait, so they keep the interpreter lock. No thread of librdkafka asks for the lock.
        self.produce = function(locked, "rd_kafka_produce", *produce)
        self.last_error = function(locked, "rd_kafka_last_error", c_int)
        self.poll = function(locked, "rd_kafka_queue_poll", c_void_p, c_void_p, c_int)
        self.event_kind = function(locked, "rd_kafka_event_type", c_int, c_void_p)
        self.event_error = function(locked, "rd_kafka_event_error", c_int, c_void_p)
        self.event_message = function(locked, "rd_kafka_event_message_next", POINTER(_Message), c_void_p)
        self.event_destroy = function(locked, "rd_kafka_event_destroy", None, c_void_p)


@cache
def _library() -> _Library | None:
    try:
        return _Library(cimpl.__file__)
    except (AttributeError, OSError):
        return None


def available(settings: Mapping[str, Any]) -> bool:
    """Return whether this system has eventfd, and the functions of librdkafka were found and accept values like these.

    confluent-kafka also accepts functions.
    """
    return (
        hasattr(os, "eventfd")
        and _library() is not None
        and all(value is None or isinstance(value, str | int | float) for value in settings.values())
    )


def _text(value: str | float | None) -> bytes | None:
    if value is None:
        return None
    return (str(value).lower() if isinstance(value, bool) else str(value)).encode()


class EventProducer:
    """A producer for one topic. ``descriptor`` becomes readable when reports are waiting.

    All methods may be called from any thread, but ``reports`` and ``stop`` from one thread only.
    """

    def __init__(self, settings: Mapping[str, Any], topic: str) -> None:
        """Start a client. Raises KafkaException for settings that librdkafka refuses, and OSError without file descriptors."""
        library = _library()
        if library is None:
            raise RuntimeError("the functions of librdkafka were not found")
        self._library = library
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            client = _client(library, settings)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._client = client
        self._queue = library.queue_of(client)
        self._topic = library.topic_new(client, topic.encode(), None)
        library.io_events(self._queue, self.descriptor, _ONE, len(_ONE))
        # The client ends when no thread uses it any more: another thread may still be in ``produce``.
        weakref.finalize(self, _release, library, client, self._queue, self._topic, self.descriptor).atexit = False

    def __len__(self) -> int:
        """Return the number of records whose reports have not been read."""
        return int(self._library.unreported(self._client))

    def produce(self, partition: int, key: bytes, value: bytes) -> None:
        """Send a record. Raises KafkaException if the client refuses it."""
        produce = self._library.produce if len(value) < _UNLOCKED_COPY_BYTES else self._library.produce_large
        if produce(self._topic, partition, _COPY, value, len(value), key, len(key), None):
            raise KafkaException(KafkaError(self._library.last_error()))

    def reports(self) -> list[tuple[int, KafkaError | None]]:
        """Return offset and error of the records that were stored or refused, in their order, and a fatal error of the client.

        The offset is negative if it is unknown. The descriptor is readable again only for reports that this call has not returned.
        """
        library, queue = self._library, self._queue
        with suppress(BlockingIOError):  # an earlier call has returned the reports
            os.eventfd_read(self.descriptor)
        found: list[tuple[int, KafkaError | None]] = []
        while event := library.poll(queue, 0):  # up to the end: librdkafka writes again only for the first report in an empty queue
            try:
                kind = library.event_kind(event)
                if kind == _DELIVERY:
                    while message := library.event_message(event):
                        report = message.contents
                        code = report.error
                        found.append((report.offset, KafkaError(code) if code else None))
                elif kind == _ERROR and library.event_error(event) == KafkaError._FATAL:
                    found.append((-1, self._fatal_error()))
            finally:
                library.event_destroy(event)
        return found

    def _fatal_error(self) -> KafkaError:
        text = ctypes.create_string_buffer(_ERROR_BYTES)
        code = self._library.fatal_error(self._client, text, _ERROR_BYTES)
        return KafkaError(code, text.value.decode(errors="replace"), fatal=True)

    def stop(self) -> None:
        """Stop writing to the descriptor."""
        self._library.io_events(self._queue, -1, None, 0)

    def purge(self) -> None:
        """Drop the records that are not stored yet."""
        self._library.purge(self._client, _PURGE_ALL)


def _client(library: _Library, settings: Mapping[str, Any]) -> int:
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    conf = library.conf_new()
    library.conf_set_events(conf, _DELIVERY | _ERROR)
    client: int | None = None
    try:
        if all(library.conf_set(conf, name.encode(), _text(value), error, _ERROR_BYTES) == 0 for name, value in settings.items()):
            client = library.new(_PRODUCER, conf, error, _ERROR_BYTES)
    finally:
        if client is None:  # otherwise the client owns its configuration
            library.conf_destroy(conf)
    if client is None:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, error.value.decode(errors="replace")))
    return client


def _release(library: _Library, client: int, queue: int, topic: int, descriptor: int) -> None:
    library.io_events(queue, -1, None, 0)
    library.topic_destroy(topic)
    library.queue_destroy(queue)
    library.destroy(client)
    os.close(descriptor)
