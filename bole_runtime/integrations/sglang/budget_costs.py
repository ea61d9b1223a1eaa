"""Costs of a calibration file, for rounds of an engine."""

from __future__ import annotations

from bole_runtime.integrations.sglang.options import BUDGET_COSTS
from bole_runtime.integrations.sglang.served import NotServed


class FileCosts:
    """What a calibration says of a forward; nothing where it was not calibrated that far.

    Args:
        table: a :class:`bole_runtime.budget.CalibrationTable`.

    Attributes:
        kv: context length of the round.
    """

    def __init__(self, table: object) -> None:
        from bole_runtime.budget.table import CalibrationTable

        assert isinstance(table, CalibrationTable)
        self._table = table
        self.kv = 1

    @classmethod
    def read(cls, path: str) -> FileCosts:
        """Read a calibration file.

        Raises:
            NotServed: it is none.
        """
        from bole_runtime.budget.table import load_calibration

        try:
            return cls(load_calibration(path))
        except (OSError, ValueError) as error:
            raise NotServed(f"{BUDGET_COSTS}: {error}") from error

    def __call__(self, batch: int, nodes: int) -> float | None:
        """Return the microseconds of a forward."""
        try:
            return self._table.cost(batch, nodes, self.kv)
        except ValueError:  # beyond what was calibrated
            return None
