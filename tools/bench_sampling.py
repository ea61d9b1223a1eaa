"""Times what a round does besides the layers: trees from links, allocation, acceptance.

    python3 tools/bench_sampling.py --batch 1,8,32,64 --nodes 16,64 --csv sampling.csv

Every operation is captured in a CUDA graph, several times with tensors of its own so that logits are cold in L2, and
the median of the replays is divided by their number. The floor of an acceptance is the bytes of the rows of logits that
its walk visits over the copy bandwidth of the run; the other operations move next to nothing, their floor is their
launches. Before a time counts, the outputs are compared with those of the torch code on the same tensors. Two orders of
summing 150,000 small weights may part by a token where a draw falls next to a boundary, so the last token of a request,
the one that is drawn, may be up to 16 ids from the other's if all else is equal. Every other difference is WRONG.

Exit status: 0 done, 1 a wrong result, 2 no GPU or bad arguments. --check-only compares without timing.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch
from bench_args import check_outputs, check_trees, whole, write_whole
from tabulate import tabulate
from verify_bench.grid import parse_ints

from bole_codegen.measure import copy_bandwidth, make_parents, time_launches
from bole_runtime import Acceptance, SamplingParams, TreeBatch, accept, set_backend
from bole_runtime.budget import allocate
from bole_runtime.tree import parents_from_links

COLD_BYTES = 256 << 20
NEIGHBOURS = 16


@dataclass
class Operation:
    """One thing to time.

    Attributes:
        name: for the table.
        make: given a device and a seed, returns a launch and the tensors that it fills.
        visited: bytes that a launch cannot avoid reading, given what it filled; None where that is next to nothing.
        bytes: memory of one copy.
        draws: whether the tensors are those of an acceptance whose last token is drawn by a cumulative sum.
    """

    name: str
    make: Callable[[str, int], tuple[Callable[[], Any], list[torch.Tensor]]]
    visited: Callable[[list[torch.Tensor]], float] | None
    bytes: int
    draws: bool = False


def same_results(got: list[torch.Tensor], wanted: list[torch.Tensor], draws: bool) -> bool:
    """Return whether two results are the same, up to neighbouring tokens in place of the last one where it is drawn.

    Args:
        got: with ``draws`` path, tokens, lengths and status of an acceptance.
        wanted: likewise.
        draws: whether the last token of a request may be a neighbour.
    """
    if draws:
        path, tokens, lengths, _ = wanted
        steps = torch.arange(path.shape[1], device=path.device)
        last = steps == (lengths - 1).unsqueeze(1)
        near = last & ((got[1] - tokens).abs() <= NEIGHBOURS) & (got[1] >= 0)
        got = [got[0], torch.where(near, tokens, got[1]), *got[2:]]
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def _links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, nodes = parents.shape
    token = torch.full((batch, nodes), -1, dtype=torch.int64)
    sibling = token.clone()
    for b, row in enumerate(parents.tolist()):
        for i in range(nodes - 1, 0, -1):
            sibling[b, i] = token[b, row[i]]
            token[b, row[i]] = i
    return token, sibling


def _accept(batch: int, nodes: int, vocabulary: int, dtype: torch.dtype, method: str, filters: bool) -> Operation:
    def make(device: str, seed: int) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        gen = torch.Generator(device).manual_seed(seed)
        tree = TreeBatch.from_parents(torch.from_numpy(make_parents("ragged", batch, nodes, seed)).to(device))
        # Two tokens are likely everywhere, so that walks are some nodes long.
        logits = torch.randn(batch, nodes, vocabulary, generator=gen, device=device)
        logits[..., :2] += 14
        tokens = torch.randint(0, 2, (batch, nodes), generator=gen, device=device)
        options: dict[str, Any] = {"method": method}
        if method != "greedy":
            chosen = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if filters else {}
            options["params"] = SamplingParams(batch, **chosen, device=device)
            options["seeds"] = torch.arange(batch).to(device)
            options["positions"] = torch.zeros(batch, dtype=torch.int64).to(device)
        if method == "rejection":
            draft = logits + torch.randn(batch, nodes, vocabulary, generator=gen, device=device) * 0.3
            options["draft_probs"] = draft.softmax(-1).to(dtype)
        given = logits.to(dtype)
        out = Acceptance.empty(tree)
        return lambda: accept(given, tokens, tree, out=out, **options), [out.path, out.tokens, out.lengths, out.status]

    size = batch * nodes * vocabulary * dtype.itemsize
    name = f"accept {method}" + (", top-k, top-p" if filters else "")
    draft = 2 if method == "rejection" else 1
    return Operation(
        name,
        make,
        lambda out: draft * float(out[2].sum()) * vocabulary * dtype.itemsize,
        size * draft,
        draws=method != "greedy",
    )


def operations(batch: int, nodes: int, vocabulary: int, dtype: torch.dtype) -> Iterator[Operation]:
    """Yield what is timed at a point."""

    def build(device: str, seed: int) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        parents = torch.from_numpy(make_parents("ragged", batch, nodes, seed)).to(device)
        tree = TreeBatch(batch, nodes, device=device)
        return lambda: tree.update_(parents), [tree.ancestors, tree.depths, tree.status]

    def packed(device: str, seed: int) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        links = _links(torch.from_numpy(make_parents("ragged", batch, nodes, seed)))
        token, sibling = (t.to(device) for t in links)
        slots = torch.arange(batch).to(device)
        tree = TreeBatch(batch, nodes, max_total=batch * nodes, device=device)

        def launch() -> None:
            tree.pack_(parents_from_links(token, sibling, slots))

        return launch, [tree.parents, tree.ancestors, tree.depths, tree.status]

    def share(device: str, seed: int) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        gen = torch.Generator().manual_seed(seed)
        size = 4 * nodes
        parents = torch.from_numpy(make_parents("ragged", batch, size, seed)).to(device)
        scores = torch.rand(batch, size, generator=gen).to(device)
        tree = TreeBatch(batch, min(size, 2 * nodes), max_total=batch * nodes, device=device)
        kept = torch.empty(tree.max_total, dtype=torch.int64, device=device)

        def launch() -> None:
            kept.copy_(allocate(parents, scores, batch * nodes, tree).chosen)

        return launch, [kept, tree.parents, tree.ancestors, tree.status]

    yield Operation("tree from parents", build, None, batch * nodes * 16)
    yield Operation("packed tree from links", packed, None, batch * nodes * 32)
    if 4 * nodes <= 512:
        yield Operation("allocate of 4 N candidates", share, None, batch * nodes * 96)
    for method, filters in (("greedy", False), ("sample", False), ("sample", True), ("rejection", False)):
        yield _accept(batch, nodes, vocabulary, dtype, method, filters)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--batch", type=parse_ints, default=[1, 8, 32, 64])
    made.add_argument("--nodes", type=parse_ints, default=[16, 64])
    made.add_argument("--vocabulary", type=whole(2), default=151_936)
    made.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    made.add_argument("--replays", type=whole(1), default=20)
    made.add_argument("--csv", type=Path)
    made.add_argument("--check-only", action="store_true", help="compare results, time nothing; works without a GPU")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    line = parser()
    args = line.parse_args(arguments)
    check_trees(line, (), args.nodes)
    check_outputs(line, {"--csv": args.csv})
    gpu = torch.cuda.is_available()
    if not gpu and not args.check_only:
        print(
            "bench_sampling: no CUDA device is available, so there is nothing to time; see --check-only",
            file=sys.stderr,
        )
        return 2
    device = "cuda" if gpu else "cpu"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    bandwidth = 0.0 if args.check_only else copy_bandwidth()
    rows: list[list[object]] = []
    wrong = False
    for batch in args.batch:
        for nodes in args.nodes:
            for operation in operations(batch, nodes, args.vocabulary, dtype):
                launch, made = operation.make(device, 0)
                launch()
                got = [t.clone() for t in made]
                set_backend("torch")
                launch()
                set_backend(None)
                same = same_results(got, made, operation.draws)
                wrong |= not same
                row: list[object] = [batch, nodes, operation.name, "ok" if same else "WRONG"]
                if not args.check_only:
                    floor = operation.visited(got) / bandwidth * 1e-3 if operation.visited else None
                    del launch, made  # their memory
                    copies = max(2, min(16, COLD_BYTES // max(1, operation.bytes)))
                    timing = time_launches(lambda i, o=operation: o.make(device, i)[0], copies, args.replays)
                    row += [f"{timing.median_us:.1f}", f"{timing.spread_us:.1f}", f"{floor:.1f}" if floor else ""]
                rows.append(row)
                print("  ".join(map(str, row)), file=sys.stderr, flush=True)
    heads = ["batch", "nodes", "operation", "check", "us", "spread us", "floor us"][: len(rows[0])]
    if not args.check_only:
        print(f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth:.0f} GB/s, {args.dtype}, V {args.vocabulary}")
    print(tabulate(rows, headers=heads, disable_numparse=True))
    if args.csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([heads, *rows])
        write_whole(args.csv, text.getvalue())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
