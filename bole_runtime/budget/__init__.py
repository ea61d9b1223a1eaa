"""How many nodes to verify, and which: calibration, budget rules, allocation over the batch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bole_runtime.budget.allocation import Allocation, allocate, reach
    from bole_runtime.budget.calibration import calibrate
    from bole_runtime.budget.calibration_file import Point
    from bole_runtime.budget.correct import AcceptanceModel
    from bole_runtime.budget.online import AcceptanceByNodes, OnlineBudget
    from bole_runtime.budget.round_times import RoundClock, RoundTimes
    from bole_runtime.budget.rules import choose_capacity, expected_tokens, goodput_nodes, published_nodes
    from bole_runtime.budget.table import CalibrationError, CalibrationTable, load_calibration, save_calibration

# Lazy, because the table's schema needs msgspec.
_EXPORTS = {
    "AcceptanceByNodes": "online",
    "AcceptanceModel": "correct",
    "Allocation": "allocation",
    "CalibrationError": "table",
    "CalibrationTable": "table",
    "OnlineBudget": "online",
    "Point": "calibration_file",
    "RoundClock": "round_times",
    "RoundTimes": "round_times",
    "allocate": "allocation",
    "calibrate": "calibration",
    "choose_capacity": "rules",
    "expected_tokens": "rules",
    "goodput_nodes": "rules",
    "load_calibration": "table",
    "published_nodes": "rules",
    "reach": "allocation",
    "save_calibration": "table",
}


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'bole_runtime.budget' has no attribute {name!r}")
    value = getattr(import_module(f"bole_runtime.budget.{module}"), name)
    globals()[name] = value
    return value


__all__ = [
    "AcceptanceByNodes",
    "AcceptanceModel",
    "Allocation",
    "CalibrationError",
    "CalibrationTable",
    "OnlineBudget",
    "Point",
    "RoundClock",
    "RoundTimes",
    "allocate",
    "calibrate",
    "choose_capacity",
    "expected_tokens",
    "goodput_nodes",
    "load_calibration",
    "published_nodes",
    "reach",
    "save_calibration",
]
