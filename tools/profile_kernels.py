"""Launch the kernels of a few points once each between the marks of a profiler.

    ncu --profile-from-start off --clock-control none --set full python tools/profile_kernels.py --point gdn:64x16

Each point is FAMILY:BATCHxNODES: a verification with factors captured and a commit of a random path, with the tables
of this GPU, on random inputs; once before the profiler starts (to compile), once to warm up, once between its marks.
--check-only runs once, without a profiler, also on a CPU.

Exit status: 0 done, 2 no GPU or bad arguments.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch

from bole_codegen.measure import make_verify_inputs
from bole_runtime import Factors, TreeBatch, commit, verify
from bole_runtime.families import get_family
from bole_runtime.kernels.problem import Problem

#: Key heads, value heads, key dim, value dim of each family with tables, as its largest model has them.
HEADS: dict[str, tuple[int, int, int, int]] = {
    "gdn": (16, 32, 128, 128),
    "kda": (32, 32, 128, 128),
    "mamba2": (8, 128, 128, 64),
    "lightning": (32, 32, 128, 128),
}


@dataclass(frozen=True)
class Point:
    """A family, a batch and the nodes of each request."""

    family: str
    batch: int
    nodes: int


def parse_point(text: str) -> Point:
    """Read FAMILY:BATCHxNODES."""
    found = re.fullmatch(r"(\w+):(\d+)x(\d+)", text)
    if not found or found[1] not in HEADS or not int(found[2]) or not int(found[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not FAMILY:BATCHxNODES with a family of {', '.join(HEADS)}")
    return Point(found[1], int(found[2]), int(found[3]))


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(description="Launch kernels for a profiler.", epilog=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--point", type=parse_point, action="append", required=True, help="FAMILY:BATCHxNODES; may be repeated")
    add("--precision", choices=["fast", "lossless"], default="fast", help="profile (%(default)s)")
    add("--state-dtype", choices=["fp32", "bf16"], default="fp32", help="of the pools (%(default)s)")
    add("--seed", type=int, default=0, help="of the inputs (%(default)s)")
    add("--check-only", action="store_true", help="run once, without a profiler; works on a CPU")
    return parser


def launch(point: Point, args: argparse.Namespace, device: str) -> None:
    """Run a point: to compile, then between the profiler's marks."""
    hk, hv, dk, dv = HEADS[point.family]
    spec = get_family(point.family)
    mode = "raw" if "raw" in spec.modes else "ready"
    problem = Problem(
        "verify", point.family, dk, dv, hv // hk, "bf16", args.state_dtype, mode, args.precision, point.nodes, 16, 0, 1
    )
    inputs = make_verify_inputs(problem, hk, hv, point.batch, point.nodes, seed=args.seed, device=device)
    (layer,), tree = inputs.layers, TreeBatch.from_parents(inputs.parents)
    kept = Factors.allocate(
        tree, key_heads=hk, value_heads=hv, dk=dk, dv=dv, recurrence=point.family, gate_mode=mode,
        gate_dtype=torch.bfloat16,
    )  # fmt: skip
    accepted = torch.full_like(inputs.slots, min(3, point.nodes - 1))

    def once() -> None:
        _, factors = verify(
            layer.q, layer.k, layer.v, gates=layer.gates(mode), state=layer.state, slots=inputs.slots, tree=tree,
            recurrence=point.family, precision=args.precision, factors=kept,
        )  # fmt: skip
        commit(layer.state, inputs.slots, factors, accepted, precision=args.precision)

    once()
    if args.check_only:
        return
    once()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    once()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def main(argv: list[str] | None = None) -> int:
    """Run the tool."""
    args = build_parser().parse_args(argv)
    if not torch.cuda.is_available() and not args.check_only:
        print("profile_kernels: no CUDA device is available; --check-only runs without one", file=sys.stderr)
        return 2
    for point in args.point:
        launch(point, args, "cuda" if torch.cuda.is_available() else "cpu")
        print(f"{point.family} {point.batch}x{point.nodes} done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
