"""Whether the precision parameters of a verify configuration keep the profile of a problem, and why not."""

from __future__ import annotations

from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config
from bole_runtime.kernels.variants import common as c


def check_precision(
    problem: Problem,
    config: Config,
    whole: bool = False,
    dots: tuple[str, ...] | None = None,
    mixes: tuple[str, ...] | None = None,
) -> str | None:
    """Reason why the precision parameters of a verify configuration do not fit the problem, or None.

    Args:
        problem: the problem.
        config: the configuration.
        whole: all rows are solved in one block.
        dots: values of ``state_dot`` that keep the profile, if not those of :func:`row_dots`.
        mixes: values of ``mix`` that do, if not those of :func:`mixes` of the profile.
    """
    allowed = {
        "state_dot": c.row_dots(problem) if dots is None else dots,
        "mix": c.mixes(problem.precision) if mixes is None else mixes,
        # Where nothing is solved, one name will do.
        "solve": c.solves(problem.precision, whole and c.contracts(problem)),
    }
    for name, values in allowed.items():
        if config[name] not in values:
            if name == "solve" and config[name] in c.solves(problem.precision, normalised=True):
                return _check_solve(problem, config[name], whole)
            types = f"{problem.in_dtype} on {problem.state_dtype}"
            return f"{name}={config[name]} does not keep {problem.precision} for {types}"
    return None


def _check_solve(problem: Problem, solve: str, whole: bool) -> str:
    """Reason why a solve that keeps the profile for normalised rows in one block does not serve a problem."""
    other = c.solves(problem.precision)[0]
    if not c.erases(problem):
        return f"nothing is solved for family {problem.family!r}, of which solve={other} is the one name"
    if not c.plain(problem):
        return f"solve={solve} has the range for products of k with k only; others are solved by solve={other}"
    if not whole:
        return f"rows in several blocks are solved by solve={other}, not by {solve}"
    return f"solve={solve} has the range for l2-normalised rows only; others are solved by solve={other}"
