"""What a command does once whoever read its output is gone, as ``head`` is after its lines."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

#: Status of a command whose reader is gone: what a shell says of one that SIGPIPE ended, as it ends ``ls | head``.
GONE = 128 + signal.SIGPIPE


def flush_output() -> OSError | None:
    """Write out what was printed; return the first error, None when all of it arrived.

    What does not arrive is dropped: the interpreter tries again at its end, and would complain of it to no avail.
    """
    lost: OSError | None = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # As where the shell closed it.
                stream.flush()
        except OSError as error:
            lost = lost or error
            _drop(stream.fileno())
    return lost


def _drop(descriptor: int) -> None:
    """Send what is written to a descriptor from now on nowhere."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
