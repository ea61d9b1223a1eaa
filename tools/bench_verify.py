"""Benchmark tree verification: Bole's profiles and variants, peers, the memory floor, and errors, in one run.

    python tools/bench_verify.py --peers sglang --sglang sglang-0.5.23.whl --csv out.csv --json out.json --plot out.png
    python tools/bench_verify.py --batch 1,8,64 --nodes 16,64 --shape ragged,chain --state-dtype fp32,bf16
    python tools/bench_verify.py --family kda --hk 32 --hv 32 --points 64x16 --peers sglang --sglang DIR
    python tools/bench_verify.py --points 64x16 --variant "fused(...)" --stages --eager
    python tools/bench_verify.py --points 64x8 --shape chain --pending 6 --peers replayssm-ring --sglang DIR
    python tools/bench_verify.py --points 8x16,64x64 --peers weaver-tf32,weaver-tf32x3 --weaver DIR
    python tools/bench_verify.py --replot out.json --plot out.png

Times are microseconds a layer by the protocol of bole_codegen.measure; ratios of the table are over the first peer
named, and each peer is judged by its own target. docs/peers.md says what a peer's call includes. A peer's kernels
compile at every new size: keep TRITON_CACHE_DIR between runs, or name few sizes with --peer-nodes. --stages splits a
time by kernel (prepare, readout), --variant times pinned configurations beside the dispatched one.

Every row is printed, and written to the files, as soon as it is finished. Exit status: 0 done, 1 a wrong output, a
failed point, or a peer asked for that could not be loaded (the rest is measured without it), 2 no GPU or bad
arguments, 3 a kernel broke the device.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch
from bench_args import MAX_SEED, check_outputs, check_trees, whole, words
from peers import PEERS, SOURCES, PeerOptions, load_peers, source_of
from verify_bench import grid, provenance, table
from verify_bench.candidates import TORCH_DTYPES, parse_config
from verify_bench.measure import run_point
from verify_bench.pending import FAMILIES
from verify_bench.rows import Row, read_run
from verify_bench.settings import DeviceLost, Settings

from bole_codegen.measure import copy_bandwidth
from bole_runtime.families import KERNEL_FAMILIES, get_family
from bole_runtime.kernels.problem import PENDING_BUCKETS

NO_GPU = (
    "bench_verify: no CUDA device is available, so there is nothing to time. --check-only runs the same candidates "
    "without timing, on the CPU's torch backend."
)


def _shapes(text: str) -> list[str]:
    """Split shapes at ``;``, or at commas where no shape is a list of numbers."""
    if ";" in text or any(ch.isdigit() for ch in text):
        return words(text, ";")
    return words(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(
        description="Benchmark Bole's tree verification against peers and the memory floor.",
        epilog="Without --points, --batch or --nodes, the points that have a target are run: "
        + ", ".join(f"B{b} N{n}" for b, n in grid.TARGET_POINTS),
    )
    add = parser.add_argument
    add("--points", type=grid.parse_points, help="batch x nodes pairs, e.g. 1x16,64x64")
    add("--batch", type=grid.parse_ints, help="batch sizes, crossed with --nodes")
    add("--nodes", type=grid.parse_ints, help="nodes a request")
    add("--shape", type=_shapes, default=["ragged"], help="chain, ragged, binary, star; or '2,2,2;3,3,3' (%(default)s)")
    add("--family", choices=KERNEL_FAMILIES, default="gdn", help="recurrence family (%(default)s)")
    add("--hk", type=whole(1), default=16, help="key heads; of Mamba2 the groups (%(default)s)")
    add("--hv", type=whole(1), default=32, help="value heads (%(default)s)")
    add("--dk", type=whole(1), default=128, help="key head dimension (%(default)s)")
    add("--dv", type=whole(1), default=128, help="value head dimension (%(default)s)")
    add("--in-dtype", choices=list(TORCH_DTYPES), default="bf16", help="q, k, v and raw gates (%(default)s)")
    add("--out-dtype", choices=list(TORCH_DTYPES), default="bf16", help="output of the timed calls (%(default)s)")
    add("--state-dtype", type=words, default=["fp32"], help="fp32, bf16, fp16, comma separated (fp32)")
    add("--precision", type=words, default=["fast", "lossless"], help="profiles, comma separated (both)")
    add("--gates", choices=["raw", "ready"], help="form of the gates; default raw, where the family has raw ones")
    add("--factors", choices=["captured", "alias"], default="captured", help="factor buffers written? (%(default)s)")
    add("--variant", action="append", default=[], metavar="CONFIG", help="also time a pinned configuration; repeatable")
    add("--no-tuned", action="store_true", help="time only the pinned configurations")
    add("--peers", type=words, default=[], help=f"of {', '.join(PEERS)}; ratios are over the first")
    add("--sglang", metavar="PATH", help="sglang 0.5.23: wheel, unpacked wheel, site-packages, or packed folder")
    add("--pending", type=whole(0, PENDING_BUCKETS[-1]), default=0, help="pending tokens a request (%(default)s)")
    add("--weaver", metavar="PATH", help="Weaver: folder with gdn_tree_triton.py and gdn_tree_fused.py, or a checkout")
    add("--treewy", metavar="PATH", help="TreeWY: tree_wy_triton.py, a folder with it, or a checkout")
    add("--peer-nodes", type=grid.parse_ints, help="run peers at these node counts only")
    add("--replays", type=whole(1), default=20, help="timed replays of each graph, at least 10 (%(default)s)")
    add("--layers", type=whole(1), help="layers in the graph, instead of as many as a cold L2 needs")
    add("--accepted", type=whole(1), default=4, help="nodes on an accepted path in the commit (%(default)s)")
    add("--no-commit", action="store_true", help="skip the commit")
    add("--stages", action="store_true", help="time each kernel alone, one after the other (torch.profiler)")
    add("--eager", action="store_true", help="also time the host side of an eager call")
    add("--seed", type=whole(0, MAX_SEED), help="seed of the inputs; fresh each run by default")
    add("--budget-s", type=float, help="start no new row after this many seconds")
    add("--check-only", action="store_true", help="check outputs, time nothing; works on a CPU")
    add("--csv", type=Path, help="file for the rows, one value a column")
    add("--json", type=Path, help="file for the rows with provenance")
    add("--plot", type=Path, help="file for the roofline plot (matplotlib)")
    add("--replot", type=Path, metavar="JSON", help="only draw --plot from an earlier run's --json")
    add("--verbose", action="store_true", help="say what is being checked")
    return parser


def _sizes(args: argparse.Namespace) -> list[tuple[int, int]]:
    if args.points:
        return list(args.points)
    if args.batch or args.nodes:
        return [(b, n) for b in args.batch or [1, 8, 64] for n in args.nodes or [16, 64]]
    return list(grid.TARGET_POINTS)


def _validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in args.state_dtype:
        if name not in TORCH_DTYPES:
            parser.error(f"--state-dtype: {name!r} is not one of {', '.join(TORCH_DTYPES)}")
    for name in args.precision:
        if name not in ("fast", "lossless"):
            parser.error(f"--precision: {name!r} is not fast or lossless")
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers: {name!r} is not one of {', '.join(PEERS)}")
    for option in sorted(set(SOURCES.values())):
        asked = [name for name in args.peers if source_of(name) == option]
        if getattr(args, option[2:]) is not None and not asked:
            known = ", ".join(name for name in PEERS if source_of(name) == option)
            parser.error(f"{option}: no peer of it is asked for; add --peers, of {known}")
    if args.hv % args.hk:
        parser.error(f"--hv: {args.hv} is not a multiple of --hk {args.hk}")
    check_trees(parser, args.shape, (nodes for _, nodes in _sizes(args)))
    modes = get_family(args.family).modes
    args.gates = args.gates or ("raw" if "raw" in modes else "ready")
    if args.gates not in modes:
        parser.error(f"--gates: {args.family} has {' and '.join(modes)} gates only")
    if args.pending and args.family not in FAMILIES:
        parser.error(f"--pending: pending tokens are drawn for {', '.join(FAMILIES)} only, not for {args.family}")
    if args.replays < 10 and not args.check_only:
        parser.error("--replays: the protocol takes the median of at least 10")
    if args.no_tuned and not args.variant:
        parser.error("--no-tuned: needs at least one --variant")
    try:
        args.variant = [parse_config(text) for text in args.variant]
    except (ValueError, KeyError) as error:
        parser.error(f"--variant: {error}")


def _plot(path: Path, rows: Sequence[Row], record: dict[str, Any]) -> None:
    from verify_bench.plot import roofline

    bandwidth = record.get("copy_bandwidth_gbs")
    if not bandwidth:
        raise ValueError("the run has no measured copy bandwidth")
    from bole_runtime import gpus

    gpu = gpus.identify(record["device"]["name"])
    title = f"{record['device']['name']}, triton {record['triton']}, {record['date'][:10]}"
    roofline(rows, bandwidth, title, path, None if gpu is None else gpu.bf16_tflops)


def _try_plot(path: Path, rows: Sequence[Row], record: dict[str, Any]) -> None:
    try:
        _plot(path, rows, record)
        print(f"plot: {path}")
    except (ImportError, OSError, ValueError) as error:
        print(f"plot: not drawn: {error}. --replot FILE.json draws it later.")


def _show(row: Row, header: bool) -> None:
    """Print a finished row at once; widths are fixed so that rows line up without the ones to come."""
    cells = table.cells(row)
    widths = [max(len(k), 9) for k in cells]
    if header:
        print("  ".join(k.rjust(w) for k, w in zip(cells, widths, strict=True)))
    print("  ".join(v.rjust(w) for v, w in zip(cells.values(), widths, strict=True)), flush=True)
    for name, result in row.results.items():
        for kernel, us in list(result.stages.items())[:8]:
            print(f"      {name}: {us:9.2f} us  {kernel}", flush=True)
    for line in table.note_lines(row):
        print(line, flush=True)


def _summary(rows: Sequence[Row]) -> None:
    print("\nVerify, microseconds a layer\n" + table.format_table([table.cells(row) for row in rows]))
    print("\nCandidates\n" + table.format_table([c for row in rows for c in table.detail_cells(row)]))
    parts = [table.round_cells(row) for row in rows if row.build_us is not None or row.commit]
    if parts:
        print("\nThe rest of a round (its total is the sum of the parts)\n" + table.format_table(parts))
    verdicts = table.verdict_lines(rows)
    if verdicts:
        print("\nTargets\n" + "\n".join(verdicts))
    notes = [line for row in rows for line in table.note_lines(row)]
    if notes:
        print("\nNot timed, and why\n" + "\n".join(notes))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args = parser.parse_args(argv)
    check_outputs(parser, {"--csv": args.csv, "--json": args.json, "--plot": args.plot})
    if args.replot is not None:
        if args.plot is None:
            parser.error("--replot: needs --plot")
        try:
            _plot(args.plot, *read_run(args.replot))
        except (ImportError, OSError, ValueError) as error:
            parser.error(f"--replot: {error}")
        return 0
    _validate(parser, args)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.check_only:
        print(NO_GPU, file=sys.stderr)
        return 2
    begin = time.monotonic()
    seed = args.seed if args.seed is not None else secrets.randbits(31)
    record = provenance.collect(seed, argv)
    options = PeerOptions(sglang=args.sglang, family=args.family, weaver=args.weaver, treewy=args.treewy)
    peers, missing = load_peers(args.peers, options)
    record["peers"] = {p.name: p.version for p in peers}
    record["peers_missing"] = missing
    for name, reason in missing.items():
        print(f"peer {name} is not available: {reason}")
    timing = on_gpu and not args.check_only
    bandwidth = copy_bandwidth() if timing else None
    record["copy_bandwidth_gbs"] = bandwidth
    print(
        f"{record['device']['name']}, torch {record['torch']}, triton {record['triton']}, source {record['source']}, "
        f"seed {seed}" + (f", copy bandwidth {bandwidth:.0f} GB/s" if bandwidth else ""),
        flush=True,
    )
    settings = Settings(
        profiles=args.precision,
        pinned=args.variant,
        tuned=not args.no_tuned,
        peers=peers,
        peer_nodes=args.peer_nodes,
        replays=args.replays,
        layers=args.layers,
        accepted=args.accepted,
        commit=not args.no_commit,
        stages=args.stages,
        eager=args.eager,
        timing=timing,
        device="cuda" if on_gpu else "cpu",
        bandwidth_gbs=bandwidth,
        log=(lambda text: print(text, flush=True)) if args.verbose else (lambda text: None),
    )
    points = grid.expand(
        _sizes(args), args.shape, args.state_dtype, hk=args.hk, hv=args.hv, dk=args.dk, dv=args.dv,
        in_dtype=args.in_dtype, out_dtype=args.out_dtype, gates=args.gates, factors=args.factors,
        family=args.family, pending=args.pending,
    )  # fmt: skip
    rows: list[Row] = []
    status = 0
    for number, point in enumerate(points):
        if args.budget_s is not None and time.monotonic() - begin > args.budget_s:
            rows.append(Row(point, note=f"not run: the budget of {args.budget_s:g} s was spent"))
            continue
        try:
            row = run_point(point, settings, seed + number)
        except DeviceLost as error:
            rows.append(Row(point, note=f"the device was lost, no further row can run: {error}"))
            status = 3
            break
        except torch.cuda.OutOfMemoryError as error:
            row = Row(point, note=f"out of memory: {str(error).splitlines()[0]}")
        except Exception as error:
            # One point that cannot be set up must not cost the others.
            row = Row(point, note=f"failed: {type(error).__name__}: {error}")
        rows.append(row)
        _show(row, header=number == 0)
        table.save(rows, record, args.csv, args.json)
        if on_gpu:
            torch.cuda.empty_cache()
    record["clocks_after"] = provenance.clocks() if on_gpu else None
    record["seconds"] = round(time.monotonic() - begin, 1)
    table.save(rows, record, args.csv, args.json)
    _summary(rows)
    if args.plot is not None and timing:
        _try_plot(args.plot, rows, record)
    for name, reason in missing.items():
        print(f"\nNot compared with {name}, which was asked for: {reason}")
    wrong = any(r.status.startswith("wrong") for row in rows for r in [*row.results.values(), *row.commit.values()])
    failed = any(row.note.startswith("failed") for row in rows)
    return status or (1 if wrong or failed or missing else 0)


if __name__ == "__main__":
    sys.exit(main())
