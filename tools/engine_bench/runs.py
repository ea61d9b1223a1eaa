"""The engines that are compared, and how each is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Import name -> folder of the checkout.
PACKAGES = {
    "bole_runtime": "bole_runtime", "bole_codegen": "codegen", "bole_templates": "templates", "bole_tuned": "tuned",
}  # fmt: skip
ENTRY_POINTS = """[sglang.srt.plugins]
bole = bole_runtime.integrations.sglang:register
bole-bench = engine_bench.plugin:register
"""


@dataclass(frozen=True)
class Run:
    """One way to run the engine.

    Attributes:
        speculates: with drafts.
        trees: with trees, whose nodes vary; else chains.
        bole: profile of the plug-in, or empty for SGLang alone.
        budget: the plug-in chooses the nodes in every round, from those that are asked for.
        engine: more arguments.
    """

    speculates: bool = True
    trees: bool = True
    bole: str = ""
    budget: bool = False
    engine: tuple[tuple[str, Any], ...] = ()


RUNS = {
    "ar": Run(speculates=False, trees=False),
    "tree": Run(),
    "bole": Run(bole="lossless"),
    "bole-fast": Run(bole="fast"),
    "bole-budget": Run(bole="lossless", budget=True),
    "chain": Run(trees=False),
    "chain-replay": Run(trees=False, engine=(("enable_gdn_replayssm_spec", True),)),
    "bole-chain": Run(trees=False, bole="lossless"),
}


def make_paths(folder: Path) -> None:
    """Make a folder that Python can import the checkout and find the plug-ins from, as if bole were installed."""
    for name, where in PACKAGES.items():
        (folder / name).symlink_to(ROOT / where)
    (folder / "engine_bench").symlink_to(ROOT / "tools" / "engine_bench")
    info = folder / "bole-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bole\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def node_runs(run: Run, args: argparse.Namespace) -> list[int]:
    """Return the nodes that a run is started with, once each; a budget chooses up to the largest in one run."""
    if not run.trees:
        return [args.steps + 1]
    return [max(args.nodes)] if run.budget else list(args.nodes)


def environment(run: Run, folder: Path, nodes: Sequence[int] = ()) -> dict[str, str]:
    """Return the environment of one engine's process; a budget has all ``nodes`` to choose from, if there are two.

    ``BOLE_SGLANG_BUDGET`` of this process says otherwise, such as ``1,8,32`` with rounds without drafts.
    """
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BOLE_SGLANG": "1" if run.bole else "0"}
    if run.bole:
        env["BOLE_SGLANG_PRECISION"] = run.bole
    if run.budget:
        env.setdefault("BOLE_SGLANG_BUDGET", ",".join(map(str, nodes)) if len(nodes) > 1 else "auto")
    else:
        env = {name: value for name, value in env.items() if not name.startswith("BOLE_SGLANG_BUDGET")}
    env["SGLANG_PLUGINS"] = "bole,bole-bench"
    return env


def engine_arguments(run: Run, nodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the engine."""
    most = max(args.batch)
    trained = any(Path(args.model).glob("*.safetensors"))
    made: dict[str, Any] = {
        "model_path": args.model, "load_format": "auto" if trained else "dummy", "skip_tokenizer_init": True,
        "dtype": args.dtype, "attention_backend": "triton", "sampling_backend": "pytorch",
        "linear_attn_backend": "triton", "grammar_backend": "none", "page_size": 1,
        "disable_radix_cache": True, "enable_multimodal": False,
        # One more than is used: SGLang's Triton attention fails at the largest graph batch with topk > 1.
        "max_running_requests": most + 1, "cuda_graph_bs_decode": sorted({*args.batch, most + 1}),
        "disable_prefill_cuda_graph": True, "context_length": 4096, "max_total_tokens": 100_000,
        "mem_fraction_static": 0.88, "chunked_prefill_size": 8192, "skip_server_warmup": True, "random_seed": 1,
        "log_level": "info",
    }  # fmt: skip
    if run.speculates:
        made |= {
            "speculative_algorithm": "NEXTN", "speculative_draft_model_path": args.model,
            "speculative_num_steps": args.steps, "speculative_eagle_topk": args.topk if run.trees else 1,
            "speculative_num_draft_tokens": nodes,
        }  # fmt: skip
    return {**made, **dict(run.engine), **args.engine}
