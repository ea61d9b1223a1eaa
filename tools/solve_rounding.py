"""What the rounding of tensor-core operands costs the triangular solve: a model of it on a CPU.

Rounds the operands of every product of a solve, accumulates exactly, and compares the output with fp64. It is why the
fast profile solves with 11 bits (tf32, fp16) and not with 8: keys of one prompt are correlated, random ones are not.

    python tools/solve_rounding.py [--nodes 64] [--seed 0]
"""

from __future__ import annotations

import argparse

import torch
from tabulate import tabulate

CASES: tuple[tuple[str, float, float | None], ...] = (
    ("random keys", 0.0, None),
    ("correlation 0.5", 0.5, None),
    ("correlation 0.9", 0.9, None),
    ("one key, beta 0.37", 1.0, 0.37),
    ("one key, beta 1", 1.0, 1.0),
    ("one key, beta 2", 1.0, 2.0),
)


#: Solver and operand type of each column; the first is what fp32 arithmetic gives.
WAYS: tuple[tuple[str, str], ...] = (
    ("inverse", "fp32"),
    ("inverse", "tf32"),
    ("inverse", "fp16"),
    ("neumann", "fp16"),
    ("neumann", "fp16x2"),
    ("inverse", "bf16"),
)


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return fp32 values rounded to an operand type, in fp64."""
    x = x.float().contiguous()
    if kind == "bf16":
        x = x.bfloat16().float()
    elif kind == "fp16":
        x = x.half().float()
    elif kind == "tf32":
        x = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return x.double()


def product(a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a b with rounded operands and fp32 result."""
    return (rounded(a, kind) @ rounded(b, kind)).float()


def terms(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return fp32 values as a sum of one or two fp16 terms, each in fp64."""
    high = rounded(x, "fp16")
    return [high] if count == 1 else [high, rounded(x - high, "fp16")]


def neumann(reads: torch.Tensor, erase: torch.Tensor, kind: str) -> torch.Tensor:
    """Return reads (I + erase)^-1 by as many steps as there are nodes, as ``solve`` of templates/parts/solve.jinja.

    Settled columns do not change any more; what others hold until then is cut to what fp16 holds. ``fp16`` takes
    erase in two terms above 16 nodes.
    """
    nodes = erase.shape[0]
    x_terms = 2 if kind == "fp16x2" else 1
    a = terms(erase, 2 if x_terms == 2 or nodes > 16 else 1)
    x = reads
    for _ in range(nodes - 1):
        cut = x.clamp(-60000.0, 60000.0) if nodes - 1 > 11 else x
        # The product of the two low terms is left out.
        parts = [p @ q for i, p in enumerate(terms(cut, x_terms)) for j, q in enumerate(a) if i + j < 2]
        x = (reads - sum(parts)).float()
    return sum(terms(x, x_terms)).float()


def inverse(a: torch.Tensor, kind: str) -> torch.Tensor:
    """Return (I + a)^-1 by merging diagonal blocks, as the kernels do."""
    size = a.shape[0]
    i, j = torch.arange(size)[:, None], torch.arange(size)[None]
    zero = torch.zeros(())
    x = (i == j).float() - torch.where((i >> 1) == (j >> 1), a, zero)
    for level in range(1, size.bit_length() - 1):
        pair = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
        x = x - product(product(x, torch.where(pair, a, zero), kind), x, kind)
    return x


def errors(nodes: int, correlation: float, beta: float | None, seed: int, dim: int = 128) -> list[float]:
    """Return the relative error of a chain's output for each of WAYS."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=1, keepdim=True)

    keys = unit(correlation * normal(1, dim) + (1 - correlation**2) ** 0.5 * normal(nodes, dim))
    queries = unit(normal(nodes, dim) if correlation == 0 else keys + 0.5 * unit(normal(nodes, dim)))
    write = (
        torch.rand(nodes, generator=make, dtype=torch.float64) if beta is None else torch.full((nodes,), beta).double()
    )
    total = (-0.05 * torch.rand(nodes, generator=make, dtype=torch.float64)).cumsum(0)
    decay = torch.exp(total[:, None] - total[None]).tril()
    # The decays of a pair factor out of the solve, so that it sees the products of normalised rows alone.
    erase = (write[:, None] * (keys @ keys.T)).tril(-1)
    reads = (queries @ keys.T).tril()
    state, values, reach = normal(dim, dim), normal(nodes, dim), torch.exp(total)[:, None]
    right = values - reach * (keys @ state.T)
    base = reach * (queries @ state.T) * dim**-0.5
    system = torch.eye(nodes, dtype=torch.float64) + decay * erase
    solved = torch.linalg.solve_triangular(system, write[:, None] * right, upper=False, unitriangular=True)
    want = base + dim**-0.5 * (decay * reads) @ solved
    found = []
    for solver, kind in WAYS:
        mix = product(reads, inverse(erase.float(), kind), kind) if solver == "inverse" else None
        mix = neumann(reads.float(), erase.float(), kind) if mix is None else mix
        mix = mix * decay.float() * write.float()[None] * dim**-0.5
        got = base + product(mix, right, "fp32" if kind in ("fp32", "fp16x2") else "bf16").double()
        found.append(float((got - want).norm() / want.norm()))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64, help="nodes of the chain, a power of two (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (0)")
    args = parser.parse_args()
    if args.nodes < 2 or args.nodes & (args.nodes - 1):
        parser.error(f"--nodes: {args.nodes} is not allowed; allowed: powers of two from 2")
    rows = [[name, *errors(args.nodes, correlation, beta, args.seed)] for name, correlation, beta in CASES]
    headers = ["keys", *(f"{solver} {kind}" for solver, kind in WAYS)]
    print("R is applied in fp32 to fp32 and fp16x2 solves, in bf16 to the others.")
    print(tabulate(rows, headers=headers, floatfmt=".1e"))


if __name__ == "__main__":
    main()
