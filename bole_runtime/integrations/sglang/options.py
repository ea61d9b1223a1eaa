"""What the environment says to the plug-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

SWITCH = "BOLE_SGLANG"
PRECISION = "BOLE_SGLANG_PRECISION"
BUDGET = "BOLE_SGLANG_BUDGET"
BUDGET_COSTS = "BOLE_SGLANG_BUDGET_COSTS"
BUDGET_AUTO = "auto"
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes")


@dataclass(frozen=True)
class Options:
    """Settings of the plug-in.

    Attributes:
        enabled: whether Bole takes verification over.
        precision: profile of :func:`bole_runtime.verify`.
        budget: numbers of draft tokens to choose from in every round; ``auto`` for the engine's own and its halves;
            empty for always the engine's own.
        budget_costs: calibration file of the forward; empty to learn costs from rounds alone.
    """

    enabled: bool = False
    precision: str = "lossless"
    budget: tuple[int, ...] | str = ""
    budget_costs: str = ""


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
    costs = environment.get(BUDGET_COSTS, "").strip()
    budget = _budget(environment.get(BUDGET, "").strip().lower())
    if costs and not budget:
        raise ValueError(f"{BUDGET_COSTS} is set, and {BUDGET} is not")
    return Options(switch in _ON, precision, budget, costs)


def _budget(text: str) -> tuple[int, ...] | str:
    if text in _OFF:
        return ""
    if text in (*_ON, BUDGET_AUTO):
        return BUDGET_AUTO
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(
            f"{BUDGET}={text!r} is not allowed; allowed: auto, numbers from 2 on such as 8,16,32, or 0 (off)"
        )
    return tuple(sorted({int(part) for part in parts}))
