#!/usr/bin/env python3
"""Errors of verify on the hardest inputs of a solve: one key in every node of a chain, under Triton's interpreter.

    python tools/repeated_keys.py --nodes 64 --beta 1.99 --gate 0
    python tools/repeated_keys.py --nodes 128 --beta 2 --gate -0.05 --noise 0.1

Needs no GPU: fp32 inputs, 16 x 16 heads, the configuration that the analytic default takes there. Printed are relative
errors against the float64 recurrence, which the bounds of docs/kernels.md are for.
"""

from __future__ import annotations

import argparse
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ["BOLE_BACKEND"] = "triton"

DIM = 16


def error(nodes: int, beta: float, gate: float, noise: float, precision: str, variant: str) -> float:
    """Return the relative error of one call."""
    import torch

    from bole_runtime import TreeBatch, verify
    from bole_runtime.backends.triton_backend.select import _interpretable, limits_of
    from bole_runtime.kernels.problem import DEPTH_BUCKETS, NODE_BUCKETS, Problem, bucket
    from bole_runtime.kernels.variants import get_variant
    from bole_runtime.reference import verify_sequential

    torch.manual_seed(nodes)
    q, _, v = (torch.randn(1, nodes, 1, DIM) for _ in range(3))
    k = torch.randn(1, DIM).expand(1, nodes, 1, DIM) + noise * torch.randn(1, nodes, 1, DIM)
    gates = {"g": torch.full((1, nodes, 1), gate), "beta": torch.full((1, nodes, 1), beta)}
    state, slots, tree = torch.randn(1, 1, DIM, DIM), torch.tensor([0]), TreeBatch.chain(1, nodes)
    call = {"gates": gates, "state": state, "slots": slots, "tree": tree}
    config = None
    if variant:
        room, deep = bucket(nodes, NODE_BUCKETS, "nodes"), bucket(nodes, DEPTH_BUCKETS, "depth")
        problem = Problem("verify", "gdn", DIM, DIM, 1, "fp32", "fp32", "ready", precision, room, deep, 0, 1)
        config = _interpretable(problem, get_variant("verify", variant).default(problem, limits_of(-1)[1]))
    out, _ = verify(q, k.contiguous(), v, precision=precision, variant=config, **call)
    want = verify_sequential(q, k.contiguous(), v, **call).double()
    return float((out.double() - want).norm() / want.norm())


def main() -> None:
    """Print both profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64, help="of the chain, up to 512")
    parser.add_argument("--beta", type=float, default=2.0, help="write gate of every node")
    parser.add_argument("--gate", type=float, default=0.0, help="log-decay of every node, at most 0")
    parser.add_argument("--noise", type=float, default=0.0, help="how much the keys differ")
    parser.add_argument("--variant", default="", help="its default instead, such as two_stage_blocks")
    options = parser.parse_args()
    for precision in ("fast", "lossless"):
        made = error(options.nodes, options.beta, options.gate, options.noise, precision, options.variant)
        print(f"{precision:9} {made:.1e}")


if __name__ == "__main__":
    main()
