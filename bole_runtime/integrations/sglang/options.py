"""What the environment says to the plug-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SWITCH = "BOLE_SGLANG"
PRECISION = "BOLE_SGLANG_PRECISION"
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes")


@dataclass(frozen=True)
class Options:
    """Settings of the plug-in.

    Attributes:
        enabled: whether Bole takes verification over.
        precision: profile of :func:`bole_runtime.verify`.
    """

    enabled: bool = False
    precision: str = "lossless"


def read_options(environment: Mapping[str, str] = os.environ) -> Options:
    """Return the settings.

    Raises:
        ValueError: a variable has a value that means nothing.
    """
    switch = environment.get(SWITCH, "").strip().lower()
    if switch not in (*_ON, *_OFF):
        raise ValueError(f"{SWITCH}={switch!r} is not allowed; allowed: 1 (on), 0 or unset (off)")
    precision = environment.get(PRECISION, "lossless").strip().lower()
    if precision not in ("fast", "lossless"):
        raise ValueError(f"{PRECISION}={precision!r} is not allowed; allowed: lossless, fast")
    return Options(switch in _ON, precision)
