"""Benchmark a whole round of a model's recurrent layers, one captured CUDA graph a commit policy.

    python tools/bench_round.py --model qwen3.5-9b --batch 1,8,32,64 --nodes 16 --sglang sglang-0.5.23.whl
    python tools/bench_round.py --policy deferred --pending 16 --accepted 6 --csv out.csv --json out.json

A round rebuilds the trees, verifies every layer from raw gates with factors captured, accepts a path of --accepted
nodes and commits. Convolutions are left out on both sides. Times are microseconds of the whole round, all layers; a
deferred commit is averaged over a cycle of its chain. With --sglang, SGLang's serial tree kernel and its state scatter
run the same round in the same process. Before a time counts, the states after one round are compared with the float64
recurrence.

Exit status: 0 done, 1 a wrong state, a failed point, or a peer asked for that could not be loaded, 2 no GPU or bad
arguments, 3 a kernel broke the device.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch
from bench_args import MAX_SEED, check_outputs, check_trees, whole, words
from peers import PeerUnavailable
from round_bench.report import RoundRow, format_table, save
from round_bench.rounds import DTYPES, BoleRound, RoundPoint, SerialRound
from round_bench.timing import time_rounds
from verify_bench import grid, oracle, provenance
from verify_bench.settings import DeviceLost, allowed_error, reason_of

from bole_codegen.measure import VerifyInputs, capture_layers, copy_bandwidth, relative_error
from bole_codegen.presets import get_preset
from bole_runtime import LayerGeometry
from bole_runtime.precision import STATE_BOUND
from bole_runtime.state.config import POLICIES

NO_GPU = (
    "bench_round: no CUDA device is available, so there is nothing to time. --check-only runs the same rounds without "
    "timing, on the CPU's torch backend."
)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(
        description="Benchmark a whole round of a model's recurrent layers by commit policy.",
        epilog="Ratios are over SGLang's row of the same point; floors are bytes over the copy bandwidth of the run.",
    )
    add = parser.add_argument
    add("--model", default="qwen3.5-9b", help="preset whose recurrent layers are run (%(default)s)")
    add("--tp", type=whole(1), default=1, help="as one of this many tensor-parallel ranks (%(default)s)")
    add("--layers", type=whole(1), help="recurrent layers, instead of the model's")
    add("--batch", type=grid.parse_ints, default=[1, 8, 32, 64], help="requests (1,8,32,64)")
    add("--nodes", type=grid.parse_ints, default=[16], help="nodes a request (16)")
    add("--shape", default="ragged", help="tree shape, as of bench_verify (%(default)s)")
    add("--accepted", type=whole(1), default=4, help="nodes on the accepted path (%(default)s)")
    add("--policy", type=words, default=list(POLICIES), help=f"of {', '.join(POLICIES)}; all by default")
    add("--pending", type=whole(1), default=32, help="tokens of a chain under fused and deferred (%(default)s)")
    add("--precision", choices=["fast", "lossless"], default="lossless", help="profile (%(default)s)")
    add("--in-dtype", choices=list(DTYPES), default="bf16", help="q, k, v and raw gates (%(default)s)")
    add("--state-dtype", choices=list(DTYPES), default="fp32", help="of the pools (%(default)s)")
    add("--sglang", metavar="PATH", help="sglang 0.5.23: wheel, unpacked wheel or site-packages; adds its round")
    add("--replays", type=whole(1), default=20, help="timed cycles of each graph, at least 10 (%(default)s)")
    add("--seed", type=whole(0, MAX_SEED), help="seed of the inputs; fresh each run by default")
    add("--check-only", action="store_true", help="check states, time nothing; works on a CPU")
    add("--csv", type=Path, help="file for the rows, one value a column")
    add("--json", type=Path, help="file for the rows with provenance")
    return parser


def _validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in args.policy:
        if name not in POLICIES:
            parser.error(f"--policy: {name!r} is not one of {', '.join(POLICIES)}")
    if args.replays < 10 and not args.check_only:
        parser.error("--replays: the protocol takes the median of at least 10")
    check_trees(parser, [args.shape], args.nodes)
    check_outputs(parser, {"--csv": args.csv, "--json": args.json})


def geometry_of(model: str, tp: int) -> tuple[LayerGeometry, int]:
    """Return a rank's layer geometry and the number of recurrent layers of a preset.

    Raises:
        ValueError: an unknown model, one of another family, or heads that do not divide.
    """
    preset = get_preset(model)
    if preset.family != "gdn":
        raise ValueError(f"{preset.name} is of family {preset.family!r}; this benchmark runs gdn")
    share = preset.shard(tp)
    return LayerGeometry(share.hk, share.hv, share.dk, share.dv, gate_mode="raw"), preset.recurrent_layers


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _check(made: BoleRound | SerialRound, inputs: VerifyInputs, row: RoundRow) -> None:
    """Run one round and compare the states of the first and the last layer."""
    want = {n: oracle.committed_states(inputs, n, made.accept.terminal) for n in {0, len(inputs.layers) - 1}}
    made.run()
    if isinstance(made, BoleRound):
        made.manager.materialise()
    _synchronize()
    pools = made.manager.request.pools if isinstance(made, BoleRound) else made._pools
    slots = inputs.slots.long()
    row.error = max(relative_error(pools[n][slots], state) for n, state in want.items())
    profile = made.point.precision if isinstance(made, BoleRound) else "fast"
    bound = allowed_error(STATE_BOUND[profile], want, inputs.layers[0].state.dtype)
    if not row.error <= bound:
        row.status = f"wrong: error {row.error:.2e} against fp64, bound {bound:.2e}"


def run_point(point: RoundPoint, args: argparse.Namespace, seed: int, peer: tuple[Any, Any] | None) -> list[RoundRow]:
    """Check and time every way to run a round at one point."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = point.inputs(seed, device)
    rows: list[RoundRow] = []
    right: list[tuple[RoundRow, BoleRound | SerialRound]] = []
    names = [*args.policy, *(["sglang"] if peer else [])]
    for name in names:
        row = RoundRow(point.batch, point.nodes, name)
        rows.append(row)
        try:
            made: BoleRound | SerialRound
            if name == "sglang":
                assert peer is not None
                if device == "cpu":
                    row.status = "refused: its kernels need a CUDA device"
                    continue
                need = SerialRound.memory_bytes(inputs.workload, point.layers)
                free = torch.cuda.mem_get_info()[0] * 9 // 10
                if need > free:
                    row.status = f"does not fit: {need / 1e9:.1f} GB of snapshots, {free / 1e9:.1f} GB free"
                    continue
                made = SerialRound(point, inputs, *peer)
            else:
                made = BoleRound(point, inputs, name, args.pending)
            _check(made, inputs, row)
            row.bytes, row.workspace = made.bytes(), made.workspace_bytes
            if row.status == "ok":
                right.append((row, made))
        except PeerUnavailable as error:
            row.status = str(error)
        except Exception as error:
            row.status = reason_of(error)
    if right and not args.check_only:
        with ExitStack() as stack:
            graphs = {}
            for row, made in right:
                try:
                    graph = stack.enter_context(capture_layers(lambda i, m=made: m.run, 1))
                    graphs[row.what] = (graph, made.cycle)
                except Exception as error:
                    row.status = reason_of(error)
            if graphs:
                times = time_rounds(graphs, args.replays)
                for row, _ in right:
                    if row.what in times:
                        row.us, row.spread_us = times[row.what].median_us, times[row.what].spread_us
    return rows


def _load_peer(path: str | None, cache: Path) -> tuple[tuple[Any, Any] | None, str | None]:
    if path is None:
        return None, None
    from peers.sglang_loader import load_entry, locate
    from peers.sglang_scatter import load_scatter

    try:
        return (load_entry(locate(path, cache)), load_scatter(path, cache)), None
    except PeerUnavailable as error:
        return None, str(error)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args = parser.parse_args(argv)
    _validate(parser, args)
    try:
        geometry, layers = geometry_of(args.model, args.tp)
    except ValueError as error:
        parser.error(f"--model: {error}")
    if not torch.cuda.is_available() and not args.check_only:
        print(NO_GPU, file=sys.stderr)
        return 2
    seed = args.seed if args.seed is not None else secrets.randbits(31)
    record = provenance.collect(seed, argv)
    record["command"] = record["command"].replace("bench_verify", "bench_round")
    bandwidth = None if args.check_only else copy_bandwidth()
    record["copy_bandwidth_gbs"] = bandwidth
    rows: list[RoundRow] = []
    status = 0
    with tempfile.TemporaryDirectory(prefix="bole-peer-") as cache:
        peer, missing = _load_peer(args.sglang, Path(cache))
        if missing is not None:
            print(f"peer sglang is not available: {missing}")
        for batch in args.batch:
            for nodes in args.nodes:
                point = RoundPoint(
                    geometry, args.layers or layers, batch, nodes, args.shape, args.accepted, args.in_dtype,
                    args.state_dtype, args.precision,
                )  # fmt: skip
                try:
                    rows += run_point(point, args, seed, peer)
                except DeviceLost as error:
                    rows.append(RoundRow(batch, nodes, "-", status=f"the device was lost: {error}"))
                    status = 3
                except Exception as error:
                    rows.append(RoundRow(batch, nodes, "-", status=f"failed: {type(error).__name__}: {error}"))
                save(rows, record, args.csv, args.json)
                if status:
                    break
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            if status:
                break
    print(f"{args.model}, {args.layers or layers} layers, {record['device']['name']}, seed {seed}")
    print(format_table(rows, bandwidth))
    if missing is not None:
        print("Not compared with sglang, which was asked for")
    bad = any(row.status.startswith(("wrong", "failed")) for row in rows)
    return status or (1 if bad or missing is not None else 0)


if __name__ == "__main__":
    sys.exit(main())
