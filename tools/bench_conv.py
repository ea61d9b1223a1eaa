"""Benchmark convolutions along trees: Bole's configurations, SGLang's kernel, the memory floor, and errors, in one run.

    python tools/bench_conv.py --channels 4096,8192,12288 --points 1x16,8x16,64x16,64x64 --json out.json
    python tools/bench_conv.py --points 64x16 --sweep --sglang sglang-0.5.23.whl
    python tools/bench_conv.py --check-only --channels 64 --points 2x9

Times are microseconds a layer by the protocol of bole_codegen.measure. The commit row is one launch for all layers,
divided by them. --sweep times every configuration that is valid and prints the best. Exit status: 0 done, 1 a wrong
output or a peer asked for that could not be loaded, 2 no GPU or bad arguments.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch
from bench_args import MAX_SEED, check_outputs, check_trees, whole, write_whole
from peers import PeerUnavailable
from peers.sglang_conv import ConvPeer, load_conv
from verify_bench import grid, provenance

from bole_codegen.measure import (
    capture_layers,
    copy_bandwidth,
    layers_for_cold_l2,
    make_parents,
    poison_,
    relative_error,
    time_interleaved,
)
from bole_runtime import ConvFactors, TreeBatch, conv_commit, tree_conv
from bole_runtime.conv import torch_backend
from bole_runtime.conv.calls import ConvCall
from bole_runtime.kernels.space import Config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Of an output in the dtype of x: half a unit in the last place, in the mean less. SGLang rounds its products as well.
BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
PEER_BOUND = 2**-6


@dataclass
class Row:
    """One point and its results; times in microseconds a layer."""

    channels: int
    batch: int
    nodes: int
    shape: str
    layers: int = 0
    bytes: int = 0
    floor_us: float | None = None
    us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Layer:
    """Tensors of one layer; the tree and the slots are those of all."""

    x: torch.Tensor
    weight: torch.Tensor
    pool: torch.Tensor
    out: torch.Tensor


def conv_bytes(batch: int, nodes: int, channels: int, width: int, element: int, state_element: int) -> int:
    """Return the bytes a convolution must move: inputs, state and weight read once, outputs written once."""
    return (
        2 * batch * nodes * channels * element
        + batch * channels * (width - 1) * state_element
        + channels * width * element
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(description="Benchmark Bole's convolutions along proposal trees.")
    add = parser.add_argument
    add("--channels", type=grid.parse_ints, default=[8192], help="comma separated (8192)")
    add("--points", type=grid.parse_points, default=grid.parse_points("1x16,8x16,64x16,64x64"), help="batch x nodes")
    add("--shape", default="ragged", help="chain, ragged, binary, star (%(default)s)")
    add("--width", type=whole(2, 8), default=4, help="taps (%(default)s)")
    add("--dtype", choices=list(DTYPES), default="bf16", help="x, weight and output (%(default)s)")
    add("--state-dtype", choices=list(DTYPES), default="bf16", help="of the pools (%(default)s)")
    add("--accepted", type=whole(1), default=4, help="depth of the accepted node, at most (%(default)s)")
    add("--sweep", action="store_true", help="time every valid configuration")
    add("--sglang", metavar="PATH", help="sglang 0.5.23: wheel, unpacked wheel or site-packages")
    add("--layers", type=whole(1), help="layers in the graph, instead of as many as a cold L2 needs")
    add("--replays", type=whole(1), default=20, help="timed replays of each graph (%(default)s)")
    add("--seed", type=whole(0, MAX_SEED), help="of the inputs; fresh each run by default")
    add("--check-only", action="store_true", help="check outputs, time nothing; works on a CPU")
    add("--json", type=Path, help="file for the rows with provenance")
    return parser


def make_layer(args: argparse.Namespace, row: Row, device: str, seed: int) -> Layer:
    """Return random tensors of a layer."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device, dtype=torch.float32).to(dtype)

    dtype, c = DTYPES[args.dtype], row.channels
    x = normal(row.batch, row.nodes, c, dtype=dtype)
    pool = normal(row.batch, c, args.width - 1, dtype=DTYPES[args.state_dtype])
    return Layer(x, normal(c, args.width, dtype=dtype), pool, poison_(torch.empty_like(x)))


def reference(layer: Layer, slots: torch.Tensor, tree: TreeBatch) -> torch.Tensor:
    """Return the output in float64, by the torch backend."""
    x, weight, pool = (t.double() for t in (layer.x, layer.weight, layer.pool))
    call = ConvCall(x, weight, None, pool, slots, tree, True, torch.empty_like(x))
    torch_backend.tree_conv(call)
    return call.out


def configurations(layer: Layer, slots: torch.Tensor, tree: TreeBatch) -> dict[str, Config]:
    """Return every configuration that is valid for a layer, by its text."""
    from bole_runtime.backends.triton_backend.select import limits_of
    from bole_runtime.conv.triton_backend import conv_problem
    from bole_runtime.kernels.variants import all_variants

    problem = conv_problem(ConvCall(layer.x, layer.weight, None, layer.pool, slots, tree, True, layer.out))
    limits = limits_of(torch.cuda.current_device())[1]
    return {str(c): c for v in all_variants("tree_conv") for c in v.enumerate(problem, limits)}


def _run_conv(layer: Layer, slots: torch.Tensor, tree: TreeBatch, config: Config | None) -> ConvFactors:
    return tree_conv(
        layer.x, layer.weight, state=layer.pool, slots=slots, tree=tree, out=layer.out, variant=config, validate=False
    )[1]


def run_point(args: argparse.Namespace, row: Row, device: str, seed: int, peer: Callable[..., Any] | None) -> Row:
    """Check one point, and time it on a GPU unless asked not to."""
    timing = device == "cuda" and not args.check_only
    row.bytes = conv_bytes(
        row.batch, row.nodes, row.channels, args.width, DTYPES[args.dtype].itemsize, DTYPES[args.state_dtype].itemsize
    )
    row.layers = 1
    if timing:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        free = torch.cuda.mem_get_info()[0]
        windows = args.width + 1 if peer is not None else 1
        row.layers = args.layers or layers_for_cold_l2(
            row.bytes, l2, memory_cap=free // 2, bytes_per_layer=windows * row.bytes
        )
    parents = torch.from_numpy(make_parents(args.shape, row.batch, row.nodes, seed)).to(device)
    tree = TreeBatch.from_parents(parents, validate=True)
    slots = torch.randperm(row.batch, device=device).to(torch.int32)
    layers = [make_layer(args, row, device, seed + i) for i in range(row.layers)]
    first = layers[0]
    want = reference(first, slots, tree)
    candidates: dict[str, Config | None] = {"bole": None}
    if args.sweep and device == "cuda":
        candidates.update(configurations(first, slots, tree))
    launches: dict[str, Callable[[int], Callable[[], object]]] = {}
    for name, config in candidates.items():
        poison_(first.out)
        _run_conv(first, slots, tree, config)
        _judge(row, name, first.out, want, BOUNDS[DTYPES[args.dtype]])
        launches[name] = lambda i, c=config: partial(_run_conv, layers[i], slots, tree, c)  # type: ignore[misc]
    if peer is not None:
        calls = [ConvPeer(peer, part.x, part.weight, part.pool, slots, parents) for part in layers]
        _judge(row, "sglang", calls[0](), want, PEER_BOUND)
        launches["sglang"] = lambda i: calls[i]
    launches = {name: make for name, make in launches.items() if name not in row.wrong}
    if timing and launches:
        graphs = {name: capture_layers(make, row.layers) for name, make in launches.items()}
        row.us = {name: t.median_us for name, t in time_interleaved(graphs, args.replays).items()}
        for graph in graphs.values():
            graph.close()
        row.us["commit"] = _time_commit(args, layers, slots, tree)
    return row


def _judge(row: Row, name: str, out: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    row.errors[name] = relative_error(out, want)
    if not row.errors[name] <= bound:
        row.wrong.append(name)


def _time_commit(args: argparse.Namespace, layers: list[Layer], slots: torch.Tensor, tree: TreeBatch) -> float:
    factors = [ConvFactors(part.x, args.width, tree) for part in layers]
    pools = [part.pool for part in layers]
    # The last node that is deep enough, of every request.
    deep = (tree.depths >= 0) & (tree.depths < args.accepted)
    index = torch.arange(tree.max_nodes, device=tree.device)
    accepted = torch.where(deep, index, -1).amax(1).to(torch.int32)
    launch = partial(conv_commit, pools, slots, factors, accepted, validate=False)
    with capture_layers(lambda i: launch, 1, layers_per_launch=len(layers)) as graph:
        return time_interleaved({"": graph}, args.replays)[""].median_us


def show(row: Row) -> str:
    """Return the lines of a row."""
    head = f"C{row.channels} B{row.batch} N{row.nodes} {row.shape}: {row.bytes / 1e6:.1f} MB"
    if row.floor_us is not None:
        head += f", floor {row.floor_us:.2f} us, {row.layers} layers"
    lines = [head]
    names = sorted(row.errors, key=lambda n: (n not in ("bole", "sglang"), row.us.get(n, 0.0), n))
    for name in [*names, *(n for n in row.us if n not in row.errors)]:
        us, error = row.us.get(name), row.errors.get(name)
        parts = [] if us is None else [f"{us:9.2f} us"]
        if us is not None and row.floor_us and name != "commit":
            parts.append(f"{us / row.floor_us:5.2f} x floor")
        if error is not None:
            parts.append(f"error {error:.1e}" + (" WRONG" if name in row.wrong else ""))
        lines.append(f"  {name:40} " + "  ".join(parts))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args = parser.parse_args(argv)
    check_outputs(parser, {"--json": args.json})
    check_trees(parser, [args.shape], (nodes for _, nodes in args.points))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.check_only:
        print("bench_conv: no CUDA device is available; --check-only checks outputs on the CPU.", file=sys.stderr)
        return 2
    seed = args.seed if args.seed is not None else secrets.randbits(31)
    record = provenance.collect(seed, argv)
    record["command"] = record["command"].replace("bench_verify.py", "bench_conv.py", 1)
    peer = None
    if args.sglang is not None:
        try:
            peer = load_conv(args.sglang, Path(tempfile.gettempdir()) / "bole_peer_sglang")
        except PeerUnavailable as error:
            print(f"peer sglang is not available: {error}")
    timing = device == "cuda" and not args.check_only
    bandwidth = record["copy_bandwidth_gbs"] = copy_bandwidth() if timing else None
    print(f"{record['device']['name']}, torch {record['torch']}, triton {record['triton']}, seed {seed}", flush=True)
    rows: list[Row] = []
    for channels in args.channels:
        for batch, nodes in args.points:
            row = run_point(args, Row(channels, batch, nodes, args.shape), device, seed, peer)
            row.floor_us = row.bytes / bandwidth * 1e-3 if bandwidth else None
            rows.append(row)
            print(show(row), flush=True)
            if args.json is not None:
                write_whole(args.json, json.dumps({"provenance": record, "rows": [asdict(r) for r in rows]}, indent=1))
            if device == "cuda":
                torch.cuda.empty_cache()
    if args.sglang is not None and peer is None:
        print("Not compared with sglang, which was asked for")
        return 1
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
