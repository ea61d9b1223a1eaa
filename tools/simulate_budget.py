"""Simulates verification budgets: fixed, published and goodput rules for batches 1 to 256.

    python3 tools/simulate_budget.py --out budget            # analytic cost model, synthetic acceptance
    python3 tools/simulate_budget.py --costs h200.json --recorded rounds.npz --out budget

Costs come from a file of ``bole_runtime.budget.calibrate`` or from a built-in analytic model (labelled so: nobody
measured it). Acceptance is synthetic or recorded; tools/budget_sim/acceptance.py describes the file. Choosing nodes,
acceptance and correction are the library's own. Prints a table; writes OUT.csv and OUT.png.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

from bench_args import check_outputs, whole, words
from budget_sim.acceptance import Recorded, Synthetic
from budget_sim.cost import model_table
from budget_sim.policies import Settings, Simulation
from budget_sim.report import plot, text, write_csv

from bole_runtime.budget import load_calibration

NODES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def _numbers(given: str) -> list[int]:
    return [whole(1)(n) for n in words(given)]


def _real(least: float, most: float = math.inf, *, ends: bool = True) -> Callable[[str], float]:
    """Return a parser of finite numbers from ``least`` to ``most``; without the ends themselves if not ``ends``."""
    allowed = (
        f"{least} or more"
        if most == math.inf
        else f"{'' if ends else 'between '}{least} {'to' if ends else 'and'} {most}"
    )

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or not (least <= number <= most if ends else least < number < most):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: numbers, {allowed}")
        return number

    return parse


def _beside(out: Path, ending: str) -> Path:
    """Return OUT with an ending added: OUT may have dots of its own."""
    return out.with_name(out.name + ending)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--costs", type=Path, help="calibration file; default: the analytic model")
    made.add_argument("--recorded", type=Path, help="recorded rounds (.npz); default: synthetic acceptance")
    made.add_argument("--batches", type=_numbers, help="default 1,2,4,...,256, or those of --costs")
    made.add_argument("--fixed", type=_numbers, default=[1, 4, 8, 16, 32, 64], help="fixed budgets, 1 is added")
    made.add_argument("--kv", type=whole(0), default=4096, help="context length (default %(default)s)")
    made.add_argument("--eps", type=_real(0), default=0.1, help="of the published rule (default %(default)s)")
    made.add_argument("--draft-us", type=_real(0), default=900.0, help="time of drafting a round (default %(default)s)")
    made.add_argument(
        "--ease", type=_real(0, 1, ends=False), default=0.65, help="of the synthetic acceptance, in (0, 1)"
    )
    made.add_argument("--rounds", type=whole(1), default=40, help="rounds a batch (default %(default)s)")
    made.add_argument("--seed", type=whole(0), default=0)
    made.add_argument("--out", type=Path, default=Path("budget"), help="OUT.csv and OUT.png (default %(default)s)")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the simulation."""
    usage = parser()
    args = usage.parse_args(arguments)
    table_file, figure = _beside(args.out, ".csv"), _beside(args.out, ".png")
    check_outputs(usage, {"--out": table_file, "--out (figure)": figure})
    try:
        source = Recorded(args.recorded) if args.recorded else Synthetic(ease=args.ease)
        fixed = sorted({1, *args.fixed})
        if args.costs:
            table = load_calibration(args.costs)
            args.batches = args.batches or table.batches
            most = min(max(table.nodes(batch, args.kv)) for batch in args.batches)
            nodes = [n for n in NODES if n <= most]
            fixed = [n for n in fixed if n <= nodes[-1]]
        else:
            args.batches = args.batches or [2**i for i in range(9)]
            table, nodes = model_table(args.batches, sorted({*NODES, *fixed}), args.kv, depth=8), NODES
    except (ValueError, OSError) as error:
        print(f"simulate_budget: {error}", file=sys.stderr)
        return 2
    costs = f"{table.label}: {table.name} on {table.device}" + (
        "; an analytic model, nobody measured these times" if table.label == "model" else f", {table.date}"
    )
    print(f"costs       {costs}\nacceptance  {source.name}\ntokens per second of the batch:\n")
    simulation = Simulation(
        Settings(table, args.kv, args.draft_us, nodes), source, fixed, args.eps, args.rounds, args.seed
    )
    for batch in args.batches:
        started = time.perf_counter()
        simulation.run(batch)
        print(f"batch {batch}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    print(text(simulation.results))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(simulation.results, table_file)
    plot(simulation.results, f"costs: {costs}\nacceptance: {source.name}", figure)
    print(f"\nwrote {table_file} and {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
