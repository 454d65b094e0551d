"""The progress of a command, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from bascule.cli.progress import ELSEWHERE_S, TERMINAL_S, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "interval_s"), [(io.StringIO, ELSEWHERE_S), (Terminal, TERMINAL_S)])
def test_progress_is_shown_from_time_to_time(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], interval_s: float) -> None:
    said, now_s, asked = stream(), [0.0], []
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setenv("TERM", "xterm")

    def text() -> str:
        asked.append(now_s[0])
        return f"[red]at {now_s[0]:g}\x07"

    with progress("begin", lambda: now_s[0]) as show:
        for step in range(5):
            now_s[0] = step * interval_s / 2
            show(text)
    assert asked == [interval_s, 2 * interval_s]
    if stream is Terminal:
        assert said.getvalue().endswith("\x1b[2K")  # the line is removed
        assert "[red]at" in said.getvalue()  # no markup
        assert "\x07" not in said.getvalue()
    else:
        assert said.getvalue() == "".join(f"[red]at {time_s:g}\\u0007\n" for time_s in asked)
