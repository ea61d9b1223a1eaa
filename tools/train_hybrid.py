#!/usr/bin/env python3
"""Train a small hybrid with an MTP head on the standard library's sources, then measure how its drafts are accepted.

    python tools/train_hybrid.py --minutes 6 --json hybrid.json     # one GPU
    python tools/train_hybrid.py --tiny --minutes 0.2 --device cpu  # to try it

The model reads bytes: three Gated DeltaNet layers to one of attention, of transformers' own Qwen3.5 classes, 34 million
parameters, and one MTP layer. After training, held-out files are continued greedily: token by token, with chains and
with trees, drafted by prompt lookup and by the MTP head. Printed are tokens a round, the part of drafted nodes that was
accepted, and tokens a second of the whole loop in fp32, each round and each draft of the head recorded in a CUDA graph
(--no-graphs: transformers' modules one by one), prefill included. All ways must write the same text.

Exit status: 0 done, 1 a text differed, 2 no GPU or wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Last on the path, so that an installed package wins: a checkout that was not installed, under the import names.
sys.path.append(str(Path(__file__).resolve().parent / "typing"))

import torch
from bench_args import check_outputs, whole
from hybrid.export import export
from hybrid.text import prompts_of, read_library
from hybrid.train import build, losses, train
from tabulate import tabulate

from bole_runtime.integrations.transformers import MtpDrafter, MtpHead, PromptLookup, TreeDecoder


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=6.0, help="of training (%(default)s)")
    add("--rows", type=whole(1), default=32, help="stretches of text a step (%(default)s)")
    add("--length", type=whole(8), default=512, help="bytes of a stretch (%(default)s)")
    add("--prompts", type=whole(1), default=8, help="held-out files that are continued (%(default)s)")
    add("--prompt", type=whole(1), default=256, help="bytes that are given of each (%(default)s)")
    add("--new", type=whole(1), default=256, help="bytes to write (%(default)s)")
    add("--batch", type=whole(1), default=1, help="prompts at a time (%(default)s)")
    add("--no-graphs", action="store_true", help="record nothing in CUDA graphs")
    add("--tiny", action="store_true", help="a tiny model, to try the tool")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--seed", type=whole(0), default=0)
    add("--json", type=Path, help="file for all numbers")
    add("--export", type=Path, metavar="DIR", help="write a checkpoint that SGLang loads, for tools/bench_sglang.py")
    return parser


def ways(head: MtpHead, graphs: bool) -> dict[str, tuple[Any, int]]:
    """Return drafters and budgets of nodes beside the root."""

    def mtp(depth: int, width: int) -> MtpDrafter:
        return MtpDrafter(head, depth, width, cuda_graphs=graphs)

    return {
        "token by token": (None, 0),
        "prompt lookup, chain of 8": (PromptLookup(branches=1, depth=8), 8),
        "prompt lookup, tree of 16": (PromptLookup(), 15),
        "MTP, chain of 3": (mtp(3, 1), 3),
        "MTP, chain of 5": (mtp(5, 1), 5),
        "MTP, tree of 16": (mtp(5, 3), 15),
    }


def measure(model: Any, way: tuple[Any, int], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Continue every prompt one way; return texts and numbers."""
    drafter, budget = way
    decoder = TreeDecoder(model, drafter, budget=budget, max_batch=args.batch, cuda_graphs=not args.no_graphs)
    batches = [prompts[n : n + args.batch] for n in range(0, len(prompts), args.batch)]
    # Kernels are compiled and loaded, and graphs recorded, by two batches that do not count.
    for some in [batches[0], batches[-1]]:
        for _ in decoder.rounds(some, max_new_tokens=args.new, eos_token_id=[]):
            pass
    texts: list[list[int]] = []
    rounds = nodes = accepted = 0
    begun = time.perf_counter()
    for some in batches:
        made: list[list[int]] = [[] for _ in some]
        for n, result in enumerate(decoder.rounds(some, max_new_tokens=args.new, eos_token_id=[])):
            for row, tokens in zip(made, result.tokens, strict=True):
                row.extend(tokens)
            if n:
                live = [b for b, count in enumerate(result.nodes) if count]
                rounds += len(live)
                nodes += sum(result.nodes[b] - 1 for b in live)
                accepted += sum(result.accepted[b] - 1 for b in live)
        texts += made
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    tokens = sum(map(len, texts))
    return {
        "texts": texts, "tokens_a_round": (tokens - len(texts)) / max(rounds, 1),
        "nodes_accepted": accepted / nodes if nodes else None, "tokens_s": tokens / seconds, "rounds": rounds,
        "graphs": decoder.recorder.enabled,
    }  # fmt: skip


def main() -> int:
    """Train, measure, print."""
    parser = build_parser()
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; --device cpu --tiny --minutes 0.2 tries the tool")
    check_outputs(parser, {"--json": args.json})
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    text, held = read_library(200_000 if args.tiny else None)
    model, head = build(args.tiny, device)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{text.numel() / 1e6:.1f} MB of text, {len(held)} files held out; {count / 1e6:.1f} M parameters", flush=True
    )
    train(
        model, head, text, seconds=60 * args.minutes, rows=args.rows, length=args.length, seed=args.seed,
        tell=lambda line: print(line, flush=True),
    )  # fmt: skip
    prompts = prompts_of(held, args.prompts, args.prompt)
    with torch.no_grad():
        unseen = torch.tensor(
            [list(f[: args.length]) for f in held if len(f) >= args.length][: args.rows], device=device
        )
        nats = [float(x) for x in losses(model, head, unseen, 2)]
    shown = ", ".join(f"{x:.3f}" for x in nats)
    print(f"held out, nats a byte: {shown} (the next byte, and by the head the two after it)", flush=True)
    if args.export:
        export(model, head, prompts_of(held, 256, args.prompt), args.export)
        print(f"wrote {args.export}", flush=True)
    results = {}
    for name, way in ways(head, not args.no_graphs).items():
        results[name] = measure(model, way, prompts, args)
        print(f"{name}: {results[name]['tokens_s']:.0f} tokens/s", flush=True)
    base = results["token by token"]
    rows, same = [], True
    for name, got in results.items():
        equal = got["texts"] == base["texts"]
        same &= equal
        part = "" if got["nodes_accepted"] is None else f"{got['nodes_accepted']:.0%}"
        speed = got["tokens_s"]
        rows.append(
            [
                name,
                f"{got['tokens_a_round']:.2f}",
                part,
                f"{speed:.0f}",
                f"{speed / base['tokens_s']:.2f}x",
                "yes" if equal else "NO",
            ]
        )
    heads = ["drafts", "tokens a round", "of drafted nodes accepted", "tokens/s", "", "same text"]
    print("\n" + tabulate(rows, heads, disable_numparse=True))
    if args.json:
        args.json.write_text(
            json.dumps({"settings": vars(args), "held_out_nats": nats, "results": results}, default=str)
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
