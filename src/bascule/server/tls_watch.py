"""TLS of the listeners while the broker runs: files are loaded again when they change, and certificates are watched for their end."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.config import Settings
from bascule.config.tls import BrokerTls, Tls
from bascule.config.users_file import Stamp, stamp
from bascule.core.errors import InvalidInput
from bascule.core.log import get_log
from bascule.server.certificates import HeldCertificate, held_certificates
from bascule.server.listener_tls import ListenerContext, amqp_tls, server_context
from bascule.threads.lasting import end_process, lasting_thread

log = get_log(__name__)

#: Interval between two looks at the files. Files are loaded at the second look that finds them unchanged, because a certificate and its key
#: are written one after the other.
LOOK_S: Final = 1.0


class LoadedTls(NamedTuple):
    """The TLS settings of a listener, with what was loaded from their files."""

    tls: Tls
    load: Callable[[], ListenerContext | None]
    files: list[Path]
    stamps: list[Stamp] | None
    context: ListenerContext | None
    certificates: list[HeldCertificate]

    @classmethod
    def of(cls, listener: str, tls: Tls, load: Callable[[], ListenerContext | None]) -> LoadedTls:
        """Load the files of a listener. Raises InvalidInput."""
        files = list(dict.fromkeys(each for each in (tls.certificate, tls.key, tls.client_ca) if each is not None))
        stamps = _stamps(files)
        return cls(tls, load, files, stamps, load(), held_certificates(tls, f"{listener}.tls"))

    @classmethod
    def of_broker(cls, tls: BrokerTls) -> LoadedTls:
        """Load the files of the listener for AMQP. Raises InvalidInput."""
        return cls.of("broker", tls, lambda: amqp_tls(tls))

    @classmethod
    def of_admin(cls, tls: Tls) -> LoadedTls:
        """Load the files of the admin server. Raises InvalidInput."""
        return cls.of("admin", tls, lambda: server_context(tls, "admin.tls"))


class ListenerTls:
    """TLS of one listener. Another thread may call ``context`` while ``look`` is called."""

    def __init__(self, name: str, loaded: LoadedTls, clock_s: Callable[[], float] = time.time) -> None:
        """Begin with loaded files. ``name`` is that of the listener, ``clock_s`` returns seconds since 1970."""
        self.name = name
        self.up_to_date: bool  # the files were loaded after their last change
        self._clock_s = clock_s
        self._reported: dict[HeldCertificate, int] = {}
        self._lock = threading.Lock()  # against a change during a look
        self._begin(loaded)

    def change(self, loaded: LoadedTls) -> None:
        """Use other settings for new connections, with the files as they are now."""
        with self._lock:
            self._begin(loaded)

    def _begin(self, loaded: LoadedTls) -> None:
        self._tls, self._load, self._files, self._loaded = loaded.tls, loaded.load, loaded.files, loaded.stamps
        self._context, self.certificates = loaded.context, loaded.certificates
        self._seen, self._failure, self.up_to_date = self._loaded, "", True

    def context(self) -> ssl.SSLContext | None:
        """Return the context for new connections; None without TLS."""
        return self._context

    @property
    def enabled(self) -> bool:
        """Return whether the listener uses TLS."""
        return bool(self._files)

    def look(self) -> None:
        """Load files that have changed, and report certificates that expire soon."""
        with self._lock:
            seen, before = _stamps(self._files), self._seen
            self._seen = seen
            if (seen != self._loaded or not self.up_to_date) and seen == before:
                self._load_again()
            self._report_ends()

    def _load_again(self) -> None:
        """Replace the context. Connections keep the context with which they began."""
        try:
            loaded = LoadedTls.of(self.name, self._tls, self._load)
        except InvalidInput as error:
            self.up_to_date = False
            if str(error) != self._failure:
                log.error("certificates not loaded again, the certificates before stay", listener=self.name, reason=str(error))
            self._failure = str(error)
            return
        self._begin(loaded)
        log.info("certificates loaded again", listener=self.name)

    def _report_ends(self) -> None:
        now_s, reported = self._clock_s(), self._reported
        self._reported = {}
        for each in self.certificates:
            stage = each.stage(now_s)
            if stage is None:
                continue
            self._reported[each] = stage
            if reported.get(each) == stage:
                continue
            fields = {"setting": each.setting, "file": str(each.file), "subject": each.subject, "expires": each.expires}
            if each.expires_s > now_s:
                log.warning("certificate expires soon", days=each.days_left(now_s), **fields)
            else:
                log.error("certificate has expired", **fields)


def _stamps(files: Iterable[Path]) -> list[Stamp] | None:
    try:
        return [stamp(each) for each in files]
    except OSError:
        return None  # the load names the file


class TlsWatch(Collector):
    """TLS of the broker's and of the admin server's listener."""

    def __init__(self, settings: Settings) -> None:
        """Load the files. Raises InvalidInput."""
        self.broker = ListenerTls("broker", LoadedTls.of_broker(settings.broker.tls))
        self.admin = ListenerTls("admin", LoadedTls.of_admin(settings.admin.tls))
        self._running = False
        self._over = threading.Event()

    def start(self) -> None:
        """Watch the files in a thread, if there are any. After a change of the settings, call this again."""
        if self._listeners and not self._running:
            self._running = True
            lasting_thread(self._run, "tls-watch", on_failure=end_process).start()

    def close(self) -> None:
        """End the watch without waiting for its thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            for each in self._listeners:
                each.look()
            self._over.wait(LOOK_S)

    @property
    def _listeners(self) -> list[ListenerTls]:
        return [each for each in (self.broker, self.admin) if each.enabled]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of listeners with TLS."""
        ends = GaugeMetricFamily(
            "bascule_certificate_expiry_timestamp_seconds", "End of the first certificate to expire, by the setting that names its file",
            labels=("setting",),
        )  # fmt: skip
        current = GaugeMetricFamily(
            "bascule_tls_last_reload_successful", "1 if the certificates, keys and client CAs in use are those in the files",
            labels=("listener",),
        )  # fmt: skip
        for listener in self._listeners:
            current.add_metric((listener.name,), float(listener.up_to_date))
            for setting, end_s in _first_ends(listener.certificates).items():
                ends.add_metric((setting,), end_s)
        yield from (ends, current)


def _first_ends(certificates: list[HeldCertificate]) -> dict[str, float]:
    """Return the first end of the certificates of each setting, in seconds since 1970."""
    found: dict[str, float] = {}
    for each in certificates:
        found[each.setting] = min(each.expires_s, found.get(each.setting, each.expires_s))
    return found
