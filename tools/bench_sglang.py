#!/usr/bin/env python3
"""Run the real SGLang engine on one workload: without speculation, with its own trees and chains, and with Bole.

    python tools/bench_sglang.py --model DIR --runs ar,tree,bole --nodes 16,32 --batch 1,8,32 --json rows.json

Runs in the Python that has SGLang; bole is taken from this checkout. Every run is an engine of its own, in its own
process. What the model writes without speculation is recorded first (ar), and every draft is aimed at it: one random
root-to-node path of each proposal tree gets the tokens that the target will choose, so that every engine accepts the
same number of tokens a round along real tree paths (--accepted 4, a range such as 2-8, drawn anew each round, or
several of them, 2,4,6, one after the other in each engine; 0 leaves the drafts alone). The texts of every run are
compared with the recorded ones. A folder of train_hybrid.py --export has weights, an MTP head and prompts of its own:
with --accepted 0 its own drafts are verified. --texts keeps what was recorded, for a later command without ar.

Runs: ar; tree (SGLang's kernels); bole, bole-fast (the plug-in, lossless and fast); bole-budget (the plug-in chooses in
every round from all of --nodes, or from one number and its halves, or from BOLE_SGLANG_BUDGET); chain, chain-replay
(SGLang's chain of as many drafts as --steps, without and with its ReplaySSM); bole-chain.

Exit status: 0 done, 1 a run failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from engine_bench.lengths import write_length  # noqa: E402
from engine_bench.report import Row, format_rows, save_rows  # noqa: E402
from engine_bench.runs import RUNS, engine_arguments, environment, make_paths, node_runs  # noqa: E402


def parse_ranges(text: str) -> list[tuple[int, int]]:
    """Return the least and most accepted tokens of each of ``4`` or ``2-8`` or ``2,4-6``."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        least, most = int(first), int(last or first)
        if not 0 <= least <= most or (not least and most):
            raise argparse.ArgumentTypeError(f"{part!r} is no range such as 4 or 2-8")
        found.append((least, most))
    return found


def whole(text: str) -> int:
    """Return a whole number, 1 or more. (Not of bench_args, which imports what an engine's Python may lack.)"""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1 or more")
    return number


def ints(text: str) -> list[int]:
    """Return the integers of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json; without safetensors there, weights are drawn")
    add("--runs", type=lambda t: t.split(","), default=["ar", "tree", "bole"], help=f"of {', '.join(RUNS)}")
    add("--nodes", type=ints, default=[16], help="draft tokens of a tree, the root included (16)")
    add("--steps", type=whole, default=5, help="drafting steps, so the depth of trees and chains (%(default)s)")
    add("--topk", type=whole, default=4, help="branches of a node (%(default)s)")
    add("--batch", type=ints, default=[1, 8, 32], help="requests (1,8,32)")
    add("--accepted", type=parse_ranges, default=[(4, 4)], help="tokens a round: 4, 2-8 or 2,4,6; 0: as it comes (4)")
    add("--new", type=whole, default=256, help="new tokens a request (%(default)s)")
    add("--prompt", type=whole, default=128, help="prompt tokens (%(default)s)")
    add("--repeats", type=whole, default=3, help="timed runs of a batch, the fastest counts (%(default)s)")
    add("--weights", type=float, default=0.0, help="half-width of drawn weights, so that texts vary; 0: SGLang's own")
    add("--dtype", default="bfloat16", help="of weights and activations (%(default)s)")
    add("--engine", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    add("--timeout", type=whole, default=600, help="seconds a run may take (%(default)s)")
    add("--json", type=Path, help="file for all rows")
    add("--texts", type=Path, help="file for the texts of ar; without ar in --runs, those that are there are aimed at")
    add("--child", help=argparse.SUPPRESS)
    return parser


def child(asked: dict[str, Any]) -> None:
    """Run one engine; write its rows."""
    import random

    from sglang.srt.entrypoints.engine import Engine

    begun = time.perf_counter()
    engine = Engine(**asked["engine"])
    started = time.perf_counter() - begun
    rng = random.Random(0)
    made = [[rng.randrange(10, asked["vocabulary"] - 10) for _ in range(asked["prompt"])] for _ in range(256)]
    given = Path(asked["engine"]["model_path"]) / "prompts.json"
    if given.exists():
        made = [tokens[: asked["prompt"]] for tokens in json.loads(given.read_text())]
    recorded: dict[str, Any] = {"prompts": [], "outputs": [], "settings": asked["settings"]}
    rows = []

    def run(prompts: list[list[int]], new: int) -> tuple[float, list[dict[str, Any]]]:
        first = time.perf_counter()
        out = engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        )
        return time.perf_counter() - first, out if isinstance(out, list) else [out]

    at = 0
    for batch in asked["batch"]:
        # More than there are: from the beginning again.
        prompts, at = [made[(at + n) % len(made)] for n in range(batch)], at + batch
        for least, most in asked["accepted"] or [(0, 0)]:
            if asked["accepted"]:
                write_length(Path(asked["length"]), least, most)
            run(prompts, 8)
            run(prompts, 48)
            prefill = min(run(prompts, 1)[0] for _ in range(2))
            seconds, out = min((run(prompts, asked["new"]) for _ in range(asked["repeats"])), key=lambda x: x[0])
            texts = [list(o["output_ids"]) for o in out]
            tokens = sum(map(len, texts))
            rounds = [o["meta_info"].get("spec_verify_ct") or len(o["output_ids"]) for o in out]
            aimed = f"{least}-{most}" if most > least else str(least or "")
            rows.append(
                {
                    "batch": batch, "tokens": tokens, "seconds": seconds, "prefill_seconds": prefill, "texts": texts,
                    "rounds": sum(rounds), "start_seconds": started, "aimed": aimed,
                }
            )  # fmt: skip
            print(f"[bench_sglang] batch {batch} {aimed}: {tokens / seconds:.1f} tokens/s", flush=True)
            Path(asked["rows"]).write_text(json.dumps(rows))
        recorded["prompts"] += prompts
        recorded["outputs"] += texts
        if asked["record"]:
            Path(asked["record"]).write_text(json.dumps(recorded))
    engine.shutdown()


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what texts depend on."""
    names = ("model", "batch", "new", "prompt", "weights", "dtype")
    return {name: getattr(args, name) for name in names}


def run_one(name: str, nodes: int, args: argparse.Namespace, folder: Path, texts: Path) -> list[Row]:
    """Run one engine in a process of its own; return its rows, none if it failed."""
    stem = f"{name}-{nodes}"
    rows_path, phases, log = folder / f"{stem}.json", folder / f"{stem}.phases", folder / f"{stem}.log"
    kind = RUNS[name]
    aimed = kind.speculates and any(least for least, _ in args.accepted) and texts.exists()
    length = folder / f"{stem}.length"
    vocabulary = json.loads((Path(args.model) / "config.json").read_text())
    vocabulary = vocabulary.get("text_config", vocabulary)["vocab_size"]
    asked = {
        "engine": engine_arguments(kind, nodes, args), "batch": args.batch, "new": args.new, "prompt": args.prompt,
        "repeats": args.repeats, "rows": str(rows_path), "record": "" if kind.speculates else str(texts),
        "vocabulary": vocabulary, "accepted": args.accepted if aimed else [], "length": str(length),
        "settings": settings_of(args),
    }  # fmt: skip
    bench = {"phases": str(phases), "weights": args.weights, "vocabulary": vocabulary}
    if aimed:
        write_length(length, *args.accepted[0])
        bench |= {"texts": str(texts), "length": str(length)}
    env = environment(kind, folder, args.nodes) | {"BOLE_BENCH": json.dumps(bench)}
    command = [sys.executable, str(Path(__file__).resolve()), "--model", args.model, "--child", json.dumps(asked)]
    print(f"[bench_sglang] {stem}: starting", flush=True)
    begun = time.perf_counter()
    with log.open("w") as out:
        try:
            status = subprocess.run(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=args.timeout
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    print(f"[bench_sglang] {stem}: status {status}, {time.perf_counter() - begun:.0f} s, {log}", flush=True)
    if kind.budget:
        chosen = [line for line in log.read_text(errors="replace").splitlines() if "rounds by draft tokens" in line]
        print(*chosen, sep="\n", flush=True)
    if status != 0:
        print(log.read_text()[-3000:], flush=True)
    found = json.loads(rows_path.read_text()) if rows_path.exists() else []
    times = json.loads(phases.read_text()) if phases.exists() else {}
    want = json.loads(texts.read_text())["outputs"] if texts.exists() else []
    return [Row.of(stem, name, nodes, row, times, want, args.batch, log) for row in found]


def main() -> int:
    """Run everything, print the table."""
    parser = build_parser()
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    unknown = [r for r in args.runs if r not in RUNS]
    if unknown:
        parser.error(f"--runs: {', '.join(unknown)} is not one of {', '.join(RUNS)}")
    if args.texts and "ar" not in args.runs:
        recorded = json.loads(args.texts.read_text())["settings"] if args.texts.exists() else None
        if recorded != settings_of(args):
            found = "there is none" if recorded is None else f"it has {recorded}"
            parser.error(f"--texts {args.texts}: no texts of {settings_of(args)}; {found}; add ar to --runs")
    folder = Path(tempfile.mkdtemp(prefix="bench-sglang-"))
    make_paths(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    texts, rows, failed = args.texts or folder / "texts.json", [], False
    # What is aimed at comes first.
    for name in sorted(args.runs, key=lambda r: RUNS[r].speculates):
        for nodes in node_runs(RUNS[name], args):
            made = run_one(name, nodes, args, folder, texts)
            wanted = len(args.batch) * (len(args.accepted) if RUNS[name].speculates and texts.exists() else 1)
            failed |= len(made) < wanted
            rows += made
            if args.json:
                save_rows(args.json, rows, vars(args))
    print(format_rows(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
