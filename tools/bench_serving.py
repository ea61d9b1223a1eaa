#!/usr/bin/env python3
"""Serve conversations with SGLang: without speculation, with its own trees, with Bole; times to first and later tokens.

    python tools/bench_serving.py --model DIR --runs ar,tree,bole --nodes 16 --rate 4 --json serving.json

Runs in the Python that has SGLang; each run is a server of its own. Conversations share a beginning (a system prompt),
have several turns, each of which sends all that was said before, and arrive as a Poisson process: the same for every
run. The prefix cache is on. Printed are time to the first token (TTFT) and time a token after it (TPOT), mean, p50 and
p99, tokens a second, and the part of prompt tokens that the prefix cache had. Texts are compared with those of the
first run: greedy decoding writes the same whoever verifies, but for ties of bf16 logits.

DIR is a folder with config.json; train_hybrid.py --export makes one with weights and an MTP head.

Exit status: 0 done, 1 a server or a request failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from engine_bench.runs import RUNS, engine_arguments, environment, make_paths  # noqa: E402
from engine_bench.sessions import Answer, Load, run, summary  # noqa: E402

HEADS = {
    "ttft_mean": "TTFT mean", "ttft_p50": "p50", "ttft_p99": "p99", "tpot_mean": "TPOT mean", "tpot_p50": "p50",
    "tpot_p99": "p99",
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, own = parser.add_argument, Load()
    add("--model", required=True, help="folder with config.json")
    add("--runs", type=lambda t: t.split(","), default=["ar", "tree", "bole"], help=f"of {', '.join(RUNS)}")
    add("--nodes", type=int, default=16, help="draft tokens of a tree, the root included (%(default)s)")
    add("--steps", type=int, default=5, help="drafting steps (%(default)s)")
    add("--topk", type=int, default=4, help="branches of a node (%(default)s)")
    add("--sessions", type=int, default=own.sessions, help="conversations (%(default)s)")
    add("--rate", type=float, default=own.rate, help="arrivals a second (%(default)s)")
    add("--turns", type=int, default=own.turns, help="of each (%(default)s)")
    add("--shared", type=int, default=own.shared, help="tokens of the beginning that all share (%(default)s)")
    add("--question", type=int, default=own.question, help="tokens a turn adds (%(default)s)")
    add("--answer", type=int, default=own.answer, help="tokens a turn asks for (%(default)s)")
    add("--seed", type=int, default=own.seed)
    add("--dtype", default="bfloat16")
    add("--engine", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    add("--start", type=float, default=240.0, help="seconds a server may take to start (%(default)s)")
    add("--json", type=Path, help="file for everything")
    add("--child", help=argparse.SUPPRESS)
    return parser


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def serve(arguments: dict[str, Any]) -> None:
    """Be the server."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    launch_server(ServerArgs(**arguments))


def wait(port: int, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a server is healthy; whether it is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        time.sleep(1.0)
    return False


def measure(name: str, args: argparse.Namespace, load: Load, folder: Path) -> tuple[list[Answer], float, str]:
    """Start a server, run the load, stop it.

    Returns:
        Answers, seconds, and why there is none.
    """
    port, log = free_port(), folder / f"{name}.log"
    arguments = engine_arguments(RUNS[name], args.nodes if RUNS[name].trees else args.steps + 1, args)
    arguments |= {"disable_radix_cache": False, "host": "127.0.0.1", "port": port, **args.engine}
    command = [sys.executable, str(Path(__file__).resolve()), "--model", args.model, "--child", json.dumps(arguments)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment(RUNS[name], folder), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if not wait(port, process, args.start):
                return [], 0.0, f"the server did not start; {log}:\n{log.read_text(errors='replace')[-3000:]}"
            # Once without counting: kernels are compiled and loaded.
            run("127.0.0.1", port, Load(**{**asdict(load), "sessions": 2, "seed": load.seed + 1}))
            answers, seconds = run("127.0.0.1", port, load)
            return answers, seconds, ""
        finally:
            # The server's processes are one group.
            for how in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, how)
                    process.wait(20)
                    break
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


def main() -> int:
    """Run everything, print the table."""
    parser = build_parser()
    args = parser.parse_args()
    if args.child:
        serve(json.loads(args.child))
        return 0
    unknown = [r for r in args.runs if r not in RUNS]
    if unknown:
        parser.error(f"--runs: {', '.join(unknown)} is not one of {', '.join(RUNS)}")
    config = json.loads((Path(args.model) / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    # Bytes of text, where a vocabulary is one of bytes.
    load = Load(
        args.sessions, args.rate, args.turns, args.shared, args.question, args.answer,
        vocabulary=min(vocabulary, 128) if vocabulary <= 256 else vocabulary - 10, seed=args.seed,
    )  # fmt: skip
    args.batch = [min(args.sessions, 64)]
    folder = Path(tempfile.mkdtemp(prefix="bench-serving-"))
    make_paths(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows, saved, failed, first = [], {}, False, None
    for name in args.runs:
        print(f"[bench_serving] {name}: starting", flush=True)
        answers, seconds, why = measure(name, args, load, folder)
        if why:
            print(f"[bench_serving] {name}: {why}", flush=True)
            failed = True
            continue
        found = summary(answers, seconds)
        failed |= found["failed"] > 0
        for error in sorted({a.error for a in answers if a.error}):
            print(f"[bench_serving] {name}: {error}", flush=True)
        texts = {(a.session, a.turn): a.tokens for a in answers}
        first = first or texts
        same = sum(texts.get(k) == t for k, t in first.items())
        saved[name] = {"summary": found, "answers": [asdict(a) for a in answers]}
        rows.append(
            [name, *(f"{found.get(h, 0):.1f}" for h in HEADS), f"{found['tokens_s']:.0f}", f"{found['cached']:.0%}",
             f"{same}/{len(first)}"]
        )  # fmt: skip
        if args.json:
            args.json.write_text(json.dumps({"settings": vars(args), "runs": saved}, default=str))
    from tabulate import tabulate

    print(
        tabulate(rows, ["run, ms", *HEADS.values(), "tokens/s", "prompt cached", "same texts"], disable_numparse=True)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
