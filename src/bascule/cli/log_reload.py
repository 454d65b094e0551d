"""Reload of a process that can change only its log while it runs: the pipelines, ``bascule kafka``, and ``bascule up`` itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from bascule.core.errors import BasculeError
from bascule.core.log import configure, get_log
from bascule.threads.hangup import on_hangup

if TYPE_CHECKING:
    from bascule.config import Configuration
    from bascule.embedded.service_manager import ServiceManager

log = get_log(__name__)


class LogReload:
    """Reads the settings again when the process gets SIGHUP, follows those of the log, and names the others that have changed.

    ``whole_process`` is false for a process whose parts name the other settings. ``behind`` is called after each reload.
    """

    def __init__(
        self, configuration: Configuration, read: Callable[[], Configuration], manager: ServiceManager,
        *, whole_process: bool = True, behind: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._running = configuration
        self._read = read
        self._manager = manager
        self._whole_process = whole_process
        self._behind = behind

    def on_hangup(self) -> None:
        """Reload in a thread at each SIGHUP."""
        on_hangup(self.reload)

    def reload(self) -> None:
        """Reload. An error changes nothing, and is logged."""
        self._manager.reloading()
        try:
            self._follow()
        except BasculeError as error:
            log.error("settings not reloaded, the settings before stay", by="SIGHUP", reason=str(error))
        except Exception as error:  # the thread must stay, and with it the process
            log.error("settings not reloaded, the settings before stay", by="SIGHUP", reason=repr(error), exc_info=error)
        finally:
            self._behind()
            self._manager.reloaded()

    def _follow(self) -> None:
        """Read the settings and use those of the log. Raises BasculeError."""
        from bascule.config.reload_effect import ReloadEffect
        from bascule.config.reloading import check_file, compare, report

        given = self._read()
        check_file(self._running, given)
        before, after = self._running.settings, given.settings
        compared = compare(before, after, lambda path: ReloadEffect.AT_ONCE if path[0] == "log" else ReloadEffect.RESTART)
        self._running = replace(given, settings=before.model_copy(update={"log": after.log}))
        configure(after.log.values)
        report(compared if self._whole_process else compared.only("log"), "SIGHUP")
