"""Cases of CASES.md that run on any backend. ``ALL`` holds :class:`~bole_testing.cases.base.Case` objects.

Each runs with ``case.run(verify, commit, device, in_dtype, state_dtype, precision)``; ``case.cost`` says where it
fits (``small``: an interpreter, ``medium``: a CPU, ``large``: a GPU) and ``case.applies(in_dtype)`` which inputs it
is about.
"""

from __future__ import annotations

from bole_testing.cases import numeric, shapes, state
from bole_testing.cases.base import Case

ALL: tuple[Case, ...] = (*numeric.CASES, *shapes.CASES, *state.CASES)

__all__ = ["ALL", "Case"]
