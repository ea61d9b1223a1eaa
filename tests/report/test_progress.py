"""What a run shows while it goes on: lines for a file, bars for a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
import search_fakes as fakes
from rich.console import Console

from bole_codegen.report import make_progress
from bole_codegen.report import progress as module
from bole_codegen.report.progress import RichProgress
from bole_codegen.search.results import KINDS, Failed, Screened, Timed

(TARGET,) = fakes.targets((1,))
CONFIG = fakes.fakes._default(TARGET.problem, fakes.fakes.LIMITS)


def _screen(shown: Any, *kinds: str) -> None:
    for kind in kinds:
        shown.screened(CONFIG, Failed(kind, "planted"))


def test_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    stream = io.StringIO()
    shown = make_progress(stream=stream)
    shown.begin(1, 1, 10, 2)
    shown.screened(CONFIG, Screened(1e-6))
    _screen(shown, "wrong")
    shown.timed(TARGET, CONFIG, Timed(5.0, 0.1))
    shown.finished(TARGET, 5.0, 6.0)
    shown.end()
    text = stream.getvalue()
    assert "2 buckets finished by an earlier run" in text
    assert "2 of up to 10 candidates" in text
    assert "; 1 failed: 1 wrong; " in text
    assert "last improvement 5.00 us verify fast n16 w32 fused" in text
    make_progress(quiet=True, stream=stream).note("nothing")
    assert stream.getvalue() == text


def test_failures_are_shown_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    stream = io.StringIO()
    shown: Any = make_progress(stream=stream)
    shown.begin(1, 1, 20, 0)
    shown.screened(CONFIG, Screened(1e-6))
    assert "; 0 failed; 0 of 1 bucket done" in stream.getvalue().splitlines()[-1]
    _screen(shown, "hang", *["spills"] * 9, "wrong", "wrong")
    assert "; 12 failed: 9 spills, 2 wrong, 1 hang; 0 of 1 bucket done" in stream.getvalue().splitlines()[-1]
    assert shown.tried == 13


def test_every_kind_has_its_place_and_an_unknown_one_is_no_error() -> None:
    shown: Any = make_progress(stream=io.StringIO())
    _screen(shown, "something new", *reversed(KINDS))
    kinds = ", ".join(f"1 {kind}" for kind in KINDS)
    assert shown.failures() == f"{len(KINDS) + 1} failed: {kinds}, 1 something new"


def test_a_candidate_that_fails_when_it_is_timed_counts_once() -> None:
    shown: Any = make_progress(stream=io.StringIO())
    shown.screened(CONFIG, Screened(1e-6))
    targets = fakes.targets()
    for target in targets:  # Buckets of one group: the kernels are the same.
        shown.timed(target, CONFIG, Failed("illegal", "planted"))
    assert shown.failures() == "1 failed: 1 illegal"
    (other,) = fakes.targets((1,), (32,))
    shown.timed(other, CONFIG, Failed("crash", "planted"))
    assert shown.failures() == "2 failed: 1 crash, 1 illegal"
    assert shown.tried == 1


@pytest.mark.parametrize("width", [70, 160])
def test_progress_bars_in_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    shown = RichProgress(Console(file=stream, force_terminal=True, width=width))
    shown.begin(1, 1, 10, 0)
    shown.phase("compiling [1] of 2")
    shown.screened(CONFIG, Screened(1e-6))
    _screen(shown, "spills", "spills", "hang")
    shown.timed(TARGET, CONFIG, Timed(5.0, 0.1))
    shown.finished(TARGET, 5.0, 6.0)
    shown._bars.refresh()
    shown.end()
    text = stream.getvalue()
    assert "candidates" in text
    assert "3 failed" in text
    assert ("3 failed: 2 spills, 1 hang; best 5.00 us" in text) == (width > 100)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(stream=Terminal()), RichProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert not isinstance(make_progress(stream=Terminal()), RichProgress)
