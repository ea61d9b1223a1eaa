"""Lines to stderr, in order with what goes to stdout."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Print a line to stderr, after everything printed to stdout so far: both may go to one file."""
    # A reader that is gone is no reason to lose the line.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
