#!/usr/bin/env python3
"""Errors of commits on the hardest keys, which repeat or nearly repeat down a chain, against the float64 recurrence.

    python tools/commit_near_keys.py                     # 4 and 16 tokens, on a GPU; a minute
    python tools/commit_near_keys.py --tokens 20,64

Gated DeltaNet, 128 x 128, bf16 inputs, fp32 state, ``lossless``: keys are k0 + noise x random, every node of a chain is
accepted. Printed are relative errors of the recurrence in fp32, of variant ``steps`` and of two tiles of ``path``.

Exit status: 0 done, 2 no GPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch
from bole_testing.cases.base import dense_tree, make_inputs
from bole_testing.close import relative_norm
from bole_testing.gpu_plan import BF16, FP32, Setting
from bole_testing.pins import pin

from bole_runtime.reference import commit_sequential

PATH = {"variant": "path", "bv": 128, "chunk": 32, "dot": "bf16x3", "registers": 0}
PINS = {
    "steps": {"variant": "steps"},
    "path, 4 warps": {**PATH, "slice": 128, "step": 64, "warps": 4},
    "path, 1 warp": {**PATH, "slice": 32, "step": 16, "warps": 1},
}
NOISE = (0.0, 0.03, 0.3, 9.0)
GATES = ((2.0, 0.0), (1.97, 0.0), (1.0, 0.0), (1.9, -0.05))


def errors(tokens: int, noise: float, beta: float, g: float, device: str) -> dict[str, float]:
    """Return the relative error of each way to commit one chain."""
    found: dict[str, float] = {}
    for name, pinned in PINS.items():
        setup = Setting(BF16, FP32, "lossless", pin("two_stage", commit=pinned)).setup(device)
        inputs = make_inputs(
            setup, dense_tree(setup, [[-1, *range(tokens - 1)]]), heads=(2, 4), dims=(128, 128), mode="ready"
        )
        gen, shape = torch.Generator().manual_seed(11), inputs.k.shape
        keys = torch.randn(1, 1, *shape[2:], generator=gen) + noise * torch.randn(shape, generator=gen)
        inputs.k.copy_(keys)
        inputs.gates["beta"].fill_(beta)
        inputs.gates["g"].fill_(g)
        _, factors = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        last = torch.tensor([tokens - 1], dtype=torch.int32, device=device)
        pool = inputs.state.clone()
        setup.commit(pool, inputs.slots, factors, last, validate=False)
        want = commit_sequential(inputs.state, inputs.slots, factors, last)
        if not found:
            single = commit_sequential(inputs.state, inputs.slots, factors, last, dtype=torch.float32)
            found["recurrence in fp32"] = relative_norm(single, want)
        found[name] = relative_norm(pool[inputs.slots.long()], want)
    return found


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[4, 16], help="of a chain")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="a CPU runs torch in every row")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; --device cpu tries the tool")
    warnings.simplefilter("ignore")  # pinned configurations need no table
    from tabulate import tabulate

    rows = []
    for tokens in options.tokens:
        for noise in NOISE:
            for beta, g in GATES:
                made = errors(tokens, noise, beta, g, options.device)
                rows.append([tokens, noise, beta, g, *(f"{e:.1e}" for e in made.values())])
    print(tabulate(rows, ["tokens", "noise", "beta", "g", "recurrence in fp32", *PINS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
