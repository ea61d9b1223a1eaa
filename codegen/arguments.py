"""The command line of ``bole-tune``: options, and what they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bole_codegen import option_types as of
from bole_codegen.conv_arguments import add_conv_arguments, conv_ops, conv_targets, given
from bole_codegen.presets import get_preset, load_presets
from bole_codegen.search.kinds import SEARCHED_OPS, order
from bole_codegen.search.outcome import Options
from bole_codegen.search.targets import BATCHES, Geometry, Target, make_targets
from bole_runtime import __version__
from bole_runtime.families import KERNEL_FAMILIES, get_family
from bole_runtime.kernels.problem import DTYPES, OPS, PRECISIONS
from bole_runtime.kernels.variants import served

#: Options of an explicit geometry of heads.
_HEADS = ("hk", "hv", "dk", "dv")

_EXAMPLES = """examples:
  bole-tune --gpu h200 --model qwen3.5-9b
      search that model's geometry on the H200 of this machine and write tuned/h200/gdn.json
  bole-tune --gpu h100 --model qwen3.5-9b --tp 2 --nodes 16,32 --batch 1,8,64 --precision fast
      fewer buckets, as one of two tensor-parallel ranks sees the model
  bole-tune --gpu h100 --offline --model qwen3.5-9b --nodes 16 --batch 8
      no GPU needed: compile for an H100, rank by a roofline model, label the entries 'predicted'
  bole-tune --gpu h200 --hk 16 --hv 32 --dk 128 --dv 128 --state-dtype bf16 --time-budget 600
      an explicit geometry, ten minutes
  bole-tune --gpu h200 --model qwen3.5-9b --devices 0,1,2,3
      four GPUs of this machine; several machines: --storage postgresql://user@host/db
  bole-tune --gpu h200 --ops tree_conv,conv_commit --model qwen3.5-9b
      the convolutions of that model; writes tuned/h200/conv.json
  bole-tune --gpu h200 --show
      print the table
  bole-tune --gpu h200 --explain verify/gdn/dk128-dv128-g2/bf16-sfp32/raw/fast/n16-d16-p0-w256
      which entry a call of that bucket takes there, and why
  bole-tune --diff tuned-old tuned
      what changed, for a review
"""


class UsageError(Exception):
    """What was asked for cannot be done; the message says what to do instead. Exit status 2."""


@dataclass(frozen=True)
class Effort:
    """What ``--effort`` sets."""

    trials: int
    anchors: int
    rounds: int


MEASURED_EFFORTS = {"quick": Effort(14, 2, 2), "normal": Effort(22, 3, 3), "thorough": Effort(150, 99, 6)}
#: The model's time is free, so every bucket is searched; compiling is what takes long.
OFFLINE_EFFORTS = {"quick": Effort(5, 99, 1), "normal": Effort(8, 99, 2), "thorough": Effort(60, 99, 3)}
#: What an explicit geometry is of, and whose models are searched, without ``--families``.
DEFAULT_FAMILY = "gdn"
#: Seconds an offline search takes unless told otherwise.
OFFLINE_BUDGET = 100.0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``bole-tune``."""
    parser = argparse.ArgumentParser(
        prog="bole-tune",
        description="Search the fastest kernels for a GPU and a model's geometry, check them, write a table.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = of.list_of(int)
    gpu = parser.add_argument_group("GPU")
    gpu.add_argument(
        "--gpu", type=of.name, metavar="NAME", help="key or alias such as h100, h200; default, the GPU present"
    )
    gpu.add_argument("--offline", action="store_true", help="do without the GPU: compile for it and predict")
    gpu.add_argument("--devices", type=numbers, default=[0], metavar="LIST", help="CUDA indices; default 0")
    what = parser.add_argument_group("geometry (default: every shipped model of the families)")
    what.add_argument(
        "--model", type=of.name, action="append", default=[], metavar="NAME", help="model preset; may be repeated"
    )
    what.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks of the models; default 1")
    for name, doc in (("hk", "key heads"), ("hv", "value heads"), ("dk", "key head dim"), ("dv", "value head dim")):
        what.add_argument(f"--{name}", type=int, metavar="N", help=f"explicit geometry: {doc}")
    add_conv_arguments(parser)
    buckets = parser.add_argument_group("buckets (comma-separated lists)")
    buckets.add_argument(
        "--families",
        type=of.words(*KERNEL_FAMILIES),
        metavar="LIST",
        help=f"of {', '.join(KERNEL_FAMILIES)}; default, the models', else {DEFAULT_FAMILY}",
    )
    buckets.add_argument(
        "--ops",
        type=of.words(*SEARCHED_OPS),
        default=list(OPS),
        metavar="LIST",
        help=f"of {', '.join(SEARCHED_OPS)}; default {','.join(OPS)}",
    )
    buckets.add_argument("--nodes", type=numbers, default=[16, 32, 64], metavar="LIST", help="default 16,32,64")
    buckets.add_argument(
        "--batch", type=numbers, default=list(BATCHES), metavar="LIST", help=f"default {','.join(map(str, BATCHES))}"
    )
    buckets.add_argument(
        "--precision", type=of.words(*PRECISIONS), default=list(PRECISIONS), metavar="LIST", help="both"
    )
    buckets.add_argument(
        "--dtype", type=of.words(*DTYPES), default=["bf16"], metavar="LIST", help="of q, k, v or x; bf16"
    )
    buckets.add_argument(
        "--state-dtype", type=of.words(*DTYPES), metavar="LIST", help="default, the model's, else fp32"
    )
    buckets.add_argument("--gates", type=of.words("raw", "ready"), default=["raw"], metavar="LIST", help="default raw")
    buckets.add_argument(
        "--pending", type=numbers, default=[0], metavar="LIST", help="pending-chain capacity; 0 (8 for up to 8 nodes)"
    )
    buckets.add_argument(
        "--depth", type=numbers, default=[], metavar="LIST", help="default, as deep as the nodes allow"
    )
    buckets.add_argument(
        "--shape", type=of.name, default="ragged", metavar="NAME", help="tree shape of the timings; default ragged"
    )
    much = parser.add_argument_group("how much")
    much.add_argument("--effort", choices=("quick", "normal", "thorough"), default="normal", help="default normal")
    much.add_argument("--trials", type=int, metavar="N", help="candidates for each group of buckets that share kernels")
    much.add_argument(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help=f"for the whole run, 0 for none; default none, {OFFLINE_BUDGET:g} offline (but none with --exhaustive)",
    )
    much.add_argument("--seed", type=of.seed, default=0, metavar="N", help="of samplers and inputs; default 0")
    much.add_argument("--workers", type=int, metavar="N", help="processes that compile and check; default by cores")
    where = parser.add_argument_group("files")
    where.add_argument("--out", type=of.path, default=Path("tuned"), metavar="DIR", help="tables; default ./tuned")
    where.add_argument("--report", type=of.path, metavar="FILE", help="HTML report; default DIR/GPU/report.html")
    where.add_argument("--no-report", action="store_true", help="write no HTML report")
    where.add_argument(
        "--storage",
        type=of.name,
        metavar="WHERE",
        help="finished evaluations: a journal file or a database URL; default, a user cache",
    )
    resume = where.add_mutually_exclusive_group()
    resume.add_argument("--resume", action="store_true", default=True, help="go on from the storage (the default)")
    resume.add_argument("--fresh", action="store_true", help="search these buckets anew")
    tables = parser.add_argument_group("tables that exist (instead of a search); one of them")
    one = tables.add_mutually_exclusive_group()
    one.add_argument("--show", action="store_true", help="print the tables of the GPU")
    one.add_argument(
        "--diff", type=of.path, nargs=2, metavar=("OLD", "NEW"), help="what changed between two tables or folders"
    )
    one.add_argument("--explain", type=of.key, metavar="KEY", help="which entry a call of that bucket takes, and why")
    one.add_argument("--reproduce", type=of.key, metavar="KEY", help="print a script that runs that kernel alone")
    one.add_argument("--verify", action="store_true", help="check and time every entry on this GPU")
    one.add_argument("--stale", action="store_true", help="entries tuned for other templates, specs or schemas")
    one.add_argument(
        "--exhaustive", action="store_true", help="search one bucket, then try everything: how close did it come?"
    )
    tables.add_argument(
        "--only-out", action="store_true", help="of tables that exist, read those in --out and none that is shipped"
    )
    show = parser.add_argument_group("output")
    show.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    show.add_argument("--quiet", action="store_true", help="no progress")
    show.add_argument("--version", action="version", version=f"bole-tune {__version__}")
    return parser


def options_of(args: argparse.Namespace) -> Options:
    """Return how much to search.

    Raises:
        UsageError: a number is out of range.
    """
    effort = (OFFLINE_EFFORTS if args.offline else MEASURED_EFFORTS)[args.effort]
    trials = effort.trials if args.trials is None else args.trials
    if trials < 1:
        raise UsageError(f"--trials must be at least 1, got {trials}")
    budget = args.time_budget
    if budget is None:
        budget = OFFLINE_BUDGET if args.offline and not args.exhaustive else 0.0
    if not 0 <= budget < float("inf"):
        raise UsageError(f"--time-budget must be a number of seconds, 0 or more, got {budget:g}")
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers must be at least 1, got {args.workers}")
    return Options(trials=trials, anchors=effort.anchors, rounds=min(effort.rounds, trials), time_budget=budget or None)


def _geometries(args: argparse.Namespace) -> list[tuple[str, str | None, Geometry]]:
    """Return (family, state type, geometry) of everything asked for."""
    explicit = {name: getattr(args, name) for name in _HEADS}
    found: list[tuple[str, str | None, Geometry]] = []
    families = args.families or [DEFAULT_FAMILY]
    if any(v is not None for v in explicit.values()):
        missing = [f"--{name}" for name, v in explicit.items() if v is None]
        if missing:
            raise UsageError(f"an explicit geometry needs {', '.join(missing)} too")
        found += [(family, None, Geometry(**explicit)) for family in families]
    presets = [get_preset(name) for name in args.model]
    if not found and not presets:
        presets = [p for p in load_presets().values() if p.family in families and p.hk is not None]
    for preset in presets:
        if args.model:
            try:
                get_family(preset.family)
            except ValueError as error:  # Names what is not served, and why.
                raise UsageError(f"{preset.name} cannot be searched: {error}") from error
            if preset.family not in (args.families or KERNEL_FAMILIES):
                raise UsageError(f"{preset.name} is {preset.family}, which --families leaves out")
        shard = preset.shard(args.tp)
        geometry = Geometry(shard.hk, shard.hv, shard.dk, shard.dv, preset.name)
        found.append((preset.family, preset.state_dtype, geometry))
    return found


def _check_geometry(args: argparse.Namespace, ops: Sequence[str]) -> None:
    """Refuse an explicit geometry of another kind of operation than those asked for.

    Raises:
        UsageError: it is, or one is missing beside that of the other kind.
    """
    heads = [f"--{name}" for name in _HEADS if getattr(args, name) is not None]
    if heads and not ops:
        raise UsageError(f"{heads[0]} is of verify and commit, which --ops leaves out")
    if ops and conv_ops(args) and not args.model and bool(heads) != bool(given(args)):
        missing = "--hk, --hv, --dk, --dv" if given(args) else "--channels, --width"
        raise UsageError(f"--ops {','.join(args.ops)}: an explicit geometry of both kinds needs {missing} too")


def targets_of(args: argparse.Namespace) -> tuple[Target, ...]:
    """Return the buckets asked for, each once.

    Raises:
        UsageError: a model, geometry or size that cannot be served; the message says what can.
    """
    found: dict[object, Target] = {}
    ops = [op for op in args.ops if op in OPS]
    try:
        _check_geometry(args, ops)
        for target in conv_targets(args, args.families or [DEFAULT_FAMILY]):
            found.setdefault(target.problem, target)
        for family, state_dtype, geometry in _geometries(args) if ops else ():
            for target in make_targets(
                [geometry],
                ops=ops,
                families=[family],
                in_dtypes=args.dtype,
                state_dtypes=args.state_dtype or [state_dtype or "fp32"],
                # A family without raw gates is given ready ones whatever was asked for.
                gate_modes=[m for m in args.gates if m in get_family(family).modes] or ["ready"],
                precisions=args.precision,
                nodes=args.nodes,
                batches=args.batch,
                pendings=args.pending,
                depths=args.depth,
                shape=args.shape,
            ):
                if served(target.problem):
                    found.setdefault(target.problem, target)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not found:
        raise UsageError(
            "nothing to search: no shipped model has the families asked for, or no kernels serve the sizes asked for"
        )
    return tuple(sorted(found.values(), key=lambda t: order(t.problem)))
