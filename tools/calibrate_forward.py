"""Calibrates budgets on a complete forward of Qwen3.5-9B's size with random weights, one CUDA graph a point.

    python tools/calibrate_forward.py --out calibration.json
    python tools/calibrate_forward.py --batch 1,8 --kv 4096 --resume --out calibration.json
    python tools/simulate_budget.py --costs calibration.json --kv 1024 --out budget

Embedding, Gated DeltaNet layers (projections, tree_conv, verify with factors captured, gated norm), attention layers
over a cache (every node sees the context, its ancestors and itself), MLPs, and logits of all nodes; --whole adds
greedy acceptance and commit (without it no step writes states, decoding neither). Layers are plain torch in bf16
between Bole's operations, so small operations are launches of their own where an engine fuses them. Weights, states
and caches are random: times do not depend on them, texts would. The table that is written says all this in its name,
and goes where ``bole_runtime.budget`` takes calibrations.

Exit status: 0 done, 1 something failed (what is finished is in the file; --resume goes on), 2 no GPU or bad arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch
from bench_args import check_outputs, check_trees, whole
from forward_bench.attention import METHODS
from forward_bench.capture import Ahead, Forwards, busy_timer
from forward_bench.model import Model, Shape, qwen, tiny
from tabulate import tabulate
from verify_bench.grid import parse_ints

from bole_runtime.budget import CalibrationError, CalibrationTable, Point, calibrate, published_nodes

NO_GPU = "calibrate_forward: no CUDA device is available. --device cpu --tiny runs a tiny model on the CPU."


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batch", type=parse_ints, default=[1, 8, 32, 64], help="requests (1,8,32,64)")
    add("--nodes", type=parse_ints, default=[1, 4, 8, 16, 32, 64], help="nodes a request (1,4,8,16,32,64)")
    add("--kv", type=parse_ints, default=[1024, 8192], help="context lengths (1024,8192)")
    add("--depth", type=parse_ints, default=[8], help="depths of trees (8)")
    add("--precision", choices=["fast", "lossless"], default="lossless", help="of recurrent layers (%(default)s)")
    add("--attention", choices=METHODS, default="parts", help="context and tree apart, or one mask (%(default)s)")
    add("--whole", action="store_true", help="greedy acceptance and commit are part of every step")
    add("--layers", type=whole(1), help="layers, instead of the model's; the table says so")
    add("--tiny", action="store_true", help="a tiny model, to try the tool")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="a CPU runs in fp32, without graphs (%(default)s)")
    add("--repeats", type=whole(3), default=10, help="timed runs of a point (%(default)s)")
    add("--warmup", type=whole(0), default=2, help="runs before them (%(default)s)")
    add("--jobs", type=whole(0), help="processes that compile kernels ahead; default one a core, 12 at most")
    add("--seed", type=whole(0, 2**31), default=0, help="of weights, states and tokens (%(default)s)")
    add("--out", type=Path, default=Path("calibration.json"), help="the table (%(default)s)")
    add("--resume", action="store_true", help="keep what --out holds and measure the rest")
    return parser


def label(shape: Shape, full: Shape, args: argparse.Namespace) -> str:
    """Return the name of the table: what was run, and what was not."""
    layers = f"{shape.layers} layers" + (f" of {full.layers}" if shape.layers < full.layers else "")
    attention = {"parts": "context and tree apart", "masked": "SDPA with a mask"}[args.attention]
    parts = "forward, greedy acceptance, commit" if args.whole else "forward only"
    how = "fp32 on a CPU, eager" if args.device == "cpu" else "bf16, fp32 states, CUDA graph, timed on a busy device"
    return (
        f"{shape.name}'s sizes, {layers}, random weights; plain torch with bole_runtime ({args.precision}); "
        f"attention: {attention}; {parts}; {how}"
    )


def report(table: CalibrationTable) -> str:
    """Return milliseconds by nodes, and over decoding, of every batch and context, in trees of the largest depth."""
    sizes = sorted({e.nodes for e in table.entries})
    rows = []
    for batch, kv in sorted({(e.batch, e.kv) for e in table.entries}):
        row: list[object] = [batch, kv]
        decode, known = table.cost(batch, 1, kv), table.nodes(batch, kv)
        for nodes in sizes:
            us = table.cost(batch, nodes, kv) if nodes in known else None
            row.append("-" if us is None else f"{us / 1e3:.2f} ({us / decode:.2f}x)")
        rows.append([*row, published_nodes(table, batch, kv, 0.1)])
    heads = ["batch", "kv", *(f"N {n}, ms" for n in sizes), "published, eps 0.1"]
    return tabulate(rows, headers=heads, stralign="right", disable_numparse=True)


def main(argv: list[str] | None = None) -> int:
    """Calibrate; returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check_trees(parser, [], args.nodes)
    check_outputs(parser, {"--out": args.out})
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu: only with --tiny")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    started = time.perf_counter()
    full = tiny() if args.tiny else qwen()
    shape = Shape(**{**vars(full), "layers": args.layers or full.layers})
    device = torch.empty(0, device=args.device).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"method": args.attention, "whole": args.whole}
    sizes = sorted({1, *args.nodes})
    ahead = None
    if device.type == "cuda":
        points = [Point(b, n, 0, min(d, n - 1)) for b in args.batch for n in sizes for d in args.depth]
        ahead = Ahead(shape, list(dict.fromkeys(points)), args.precision, options, args.jobs)
    model = Model(
        shape, max_batch=max(args.batch), max_nodes=max(sizes), dtype=dtype, device=device, precision=args.precision,
        seed=args.seed,
    )  # fmt: skip
    if ahead is not None:
        print(f"{ahead.wait()}, {time.perf_counter() - started:.0f} s", flush=True)
    forwards = Forwards(model, **options)

    def progress(text: str) -> None:
        print(f"{time.perf_counter() - started:5.0f} s  {text}", flush=True)

    status = 0
    try:
        table: CalibrationTable | None = calibrate(
            forwards, batches=args.batch, nodes=sizes, kv_lengths=args.kv, depths=args.depth,
            name=label(shape, full, args), device=device, repeats=args.repeats, warmup=args.warmup,
            timer=busy_timer(device) if device.type == "cuda" else None, path=args.out, progress=progress,
            resume=args.resume,
        )  # fmt: skip
    except CalibrationError as error:
        print(f"calibrate_forward: {error}", file=sys.stderr)
        table, status = error.table, 1
    except (ValueError, OSError) as error:
        print(f"calibrate_forward: {error}", file=sys.stderr)
        return 2
    finally:
        forwards.close()
    if table is not None:
        print(f"{table.name}\n{table.device}, torch {table.torch_version}, {table.date}, {table.protocol}\n")
        print(report(table))
        print(f"\nwrote {args.out}, {time.perf_counter() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
