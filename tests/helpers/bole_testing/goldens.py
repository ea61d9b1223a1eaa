"""Which rendered kernels are kept as golden files, and how they are compared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bole_codegen.render import RenderedKernel, render
from bole_runtime import gpus
from bole_runtime.kernels import Problem
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.variants import get_variant

_USUAL = Problem("verify", "gdn", 128, 128, 2, "bf16", "fp32", "ready", "lossless", 16, 16, 0, 256)
_CONV = ConvProblem("tree_conv", 8192, 4, 3, "bf16", "bf16", False, True, False, 16, 0, 64)


@dataclass(frozen=True)
class Golden:
    """One kernel: number ``index`` of a variant's default configuration with some changes."""

    problem: Problem | ConvProblem
    variant: str
    changes: dict[str, Any]
    index: int = 0


def _golden(variant: str, changes: dict[str, Any], index: int = 0, **problem: Any) -> Golden:
    problem.setdefault("depth", problem.get("nodes", 16))
    op = "commit" if variant in ("path", "steps", "blocks") else "verify"
    return Golden(_USUAL.replace(op=op, **problem), variant, changes, index)


def _conv_golden(variant: str, index: int = 0, **problem: Any) -> Golden:
    commit = {"op": "conv_commit", "silu": False} if variant == "shift" else {}
    return Golden(_CONV.replace(**commit, **problem), variant, {}, index)


_BLOCKS = {"share": True, "row_block": 16, "prepare_warps": 1, "solve": "tf32x3", "gather": "apart"}
_ONE_WARP = {"row_warps": 1, "inverse_warps": 1, "solve_warps": 1}
_LOOP = {"prefetch": False, "bk": 128, "stages": 3, "bv": 64, "warps": 4, "programs": 0}
_WALK = {"prefetch": False, "programs": 256}
_RAW_FAST = {"gate_mode": "raw", "precision": "fast"}
_MAMBA2 = {"family": "mamba2", "dk": 128, "dv": 64, "group": 16, "qk_l2norm": False}
_LIGHTNING = {"family": "lightning", "group": 1, "qk_l2norm": False}
_GLA = {"family": "gla", "group": 1, "qk_l2norm": False}
_DELTANET = {"family": "deltanet", "group": 1}
_RWKV7 = {"family": "rwkv7", "dk": 64, "dv": 64, "group": 1, "qk_l2norm": False}
#: Every template, both gate modes and profiles, with and without a pending chain, one block of rows and several.
GOLDENS: dict[str, Golden] = {
    "verify_fused_ready_lossless": _golden("fused", {"bv": 32}),
    "verify_fused_raw_fast_inverse": _golden("fused", {"bv": 32, "stack": False, "solve": "tf32x3"}, **_RAW_FAST),
    "verify_fused_raw_fast_pending": _golden("fused", {"bv": 16}, pending=16, **_RAW_FAST),
    "verify_prepare_raw_fast": _golden("two_stage", {"share": False}, **_RAW_FAST),
    "verify_prepare_ready_lossless_blocks_shared": _golden("two_stage", _BLOCKS, nodes=64),
    "verify_readout_raw_fast": _golden("two_stage", {"pdl": True}, 1, **_RAW_FAST),
    "verify_readout_ready_lossless_loop": _golden("two_stage", _LOOP, 1, state_dtype="bf16", dk=200, dv=72),
    "verify_prepare_ready_fast_inverse_pending": _golden("two_stage", {"pdl": True}, precision="fast", pending=16),
    "verify_readout_ready_lossless_walks": _golden(
        "two_stage", {"programs": 256, "prefetch": False}, 1, nodes=32, pending=16
    ),
    "verify_chunked_ready_fast_pending": _golden("chunked", {"chunk": 32}, precision="fast", nodes=128, pending=16),
    "verify_prepare_blocks_raw_lossless": _golden("two_stage_blocks", {}, nodes=256, gate_mode="raw"),
    "verify_prepare_blocks_ready_fast_pending_shared": _golden(
        "two_stage_blocks", {"share": True, "block": 64}, nodes=128, precision="fast", pending=16
    ),
    "verify_readout_blocks_raw_fast": _golden("two_stage_blocks", {}, 1, nodes=256, **_RAW_FAST),
    "verify_readout_blocks_mamba2_ready_pending": _golden("two_stage_blocks", {}, 1, nodes=128, pending=16, **_MAMBA2),
    "verify_rows_raw_lossless": _golden("four_stage", {}, nodes=256, gate_mode="raw"),
    "verify_rows_mamba2_ready_pending": _golden("four_stage", {}, nodes=128, pending=16, **_MAMBA2),
    "verify_inverses_raw_fast": _golden("four_stage", {}, 1, nodes=256, **_RAW_FAST),
    "verify_inverses_ready_lossless_pending": _golden(
        "four_stage", {"row_block": 16, **_ONE_WARP}, 1, nodes=128, pending=16
    ),
    "verify_substitute_raw_fast": _golden("four_stage", {}, 2, nodes=256, **_RAW_FAST),
    "verify_substitute_unnormalised_lossless": _golden("four_stage", {"unroll": 1}, 2, nodes=128, qk_l2norm=False),
    "verify_substitute_mamba2_ready_pending": _golden("four_stage", {}, 1, nodes=128, pending=16, **_MAMBA2),
    "verify_readout_rows_raw_fast": _golden("four_stage", {}, 3, nodes=256, **_RAW_FAST),
    "verify_readout_rows_mamba2_ready_pending": _golden("four_stage", {}, 2, nodes=128, pending=16, **_MAMBA2),
    "commit_raw_lossless": _golden("path", {}, gate_mode="raw"),
    "commit_layers_ready_fast_pending": _golden("path", {}, 1, precision="fast", pending=16),
    "commit_steps_raw_lossless": _golden("steps", {}, gate_mode="raw"),
    "commit_steps_layers_ready_tiles": _golden("steps", {"bv": 16, "warps": 1, "tiles": 4}, 1),
    "commit_blocks_raw_lossless": _golden("blocks", {"block": 2}, gate_mode="raw"),
    "commit_blocks_kda_layers_raw_pending": _golden(
        "blocks", {"block": 2}, 1, pending=16, family="kda", group=1, gate_mode="raw"
    ),
    "commit_steps_layers_ready_pending": _golden("steps", {}, 1, pending=16),
    "verify_fused_mamba2_raw_fast": _golden("fused", {"bv": 32}, **_MAMBA2, **_RAW_FAST),
    "verify_prepare_mamba2_ready_blocks": _golden("two_stage", _BLOCKS, nodes=32, **{**_MAMBA2, "group": 2}),
    "verify_readout_lightning_ready_pending": _golden("two_stage", {"programs": 0}, 1, pending=16, **_LIGHTNING),
    "verify_chunked_linear_attention_ready": _golden(
        "chunked", {}, nodes=128, family="linear_attention", qk_l2norm=False
    ),
    "commit_mamba2_layers_raw_pending": _golden("path", {}, 1, pending=16, gate_mode="raw", **_MAMBA2),
    "commit_steps_lightning_ready_pending": _golden("steps", {}, pending=16, **_LIGHTNING),
    "verify_slices_kda_ready_lossless": _golden("slices", {"bv": 32}, family="kda", group=1),
    "verify_prepare_slices_kda_raw_fast": _golden("two_stage_slices", {}, family="kda", group=1, **_RAW_FAST),
    "verify_prepare_halves_kda_raw_fast": _golden("two_stage_slices", {}, family="kda", group=1, nodes=64, **_RAW_FAST),
    "verify_prepare_halves_gla_ready_lossless_pending": _golden(
        "two_stage_slices", {"halves": True, "slice": 16, "prepare_warps": 1}, pending=16, **_GLA
    ),
    "verify_readout_kda_ready_lossless_pending": _golden(
        "two_stage_slices", {"prefetch": True, "programs": 0}, 1, family="kda", group=1, pending=16
    ),
    "verify_slices_gla_raw_fast_pending": _golden("slices", {}, pending=16, **_GLA, **_RAW_FAST),
    "commit_steps_kda_layers_raw_pending": _golden("steps", {}, 1, pending=16, family="kda", group=1, gate_mode="raw"),
    "verify_fused_deltanet_raw_fast": _golden("fused", {"bv": 32}, **_DELTANET, **_RAW_FAST),
    "commit_deltanet_raw_lossless": _golden("path", {}, gate_mode="raw", **_DELTANET),
    "verify_slices_gdn2_raw_fast": _golden("slices", {}, family="gdn2", group=1, **_RAW_FAST),
    "verify_slices_comba_ready_lossless_pending": _golden("slices", {"bv": 32}, family="comba", pending=16),
    "verify_slices_rwkv7_raw_lossless": _golden("slices", {}, gate_mode="raw", **_RWKV7),
    "verify_sums_kda_raw_fast": _golden("three_stage_blocks", {}, family="kda", group=1, nodes=128, **_RAW_FAST),
    "verify_sums_comba_ready_lossless_pending": _golden("three_stage_blocks", {}, family="comba", nodes=64, pending=16),
    "verify_pairs_kda_raw_fast": _golden("three_stage_blocks", {}, 1, family="kda", group=1, nodes=128, **_RAW_FAST),
    "verify_pairs_rwkv7_raw_lossless_pending": _golden(
        "three_stage_blocks", {}, 1, nodes=64, pending=16, gate_mode="raw", **_RWKV7
    ),
    "verify_readout_pairs_gdn2_ready_lossless": _golden("three_stage_blocks", {}, 2, family="gdn2", group=1, nodes=64),
    "verify_readout_pairs_rwkv7_raw_fast_pending": _golden(
        "three_stage_blocks", {}, 2, nodes=128, pending=16, **_RWKV7, **_RAW_FAST
    ),
    "verify_readout_pairs_gla_ready_lossless": _golden("three_stage_blocks", {}, 2, nodes=256, **_GLA),
    "commit_steps_gdn2_ready": _golden("steps", {}, family="gdn2", group=1),
    "commit_steps_comba_layers_raw_pending": _golden("steps", {}, 1, pending=16, family="comba", gate_mode="raw"),
    "commit_steps_rwkv7_raw": _golden("steps", {}, gate_mode="raw", **_RWKV7),
    "tree_conv_silu": _conv_golden("gather"),
    "tree_conv_rows_silu_pending": _conv_golden("rows", pending=16),
    "tree_conv_bias_dynamic_pending": _conv_golden(
        "gather", width=3, length=3, state_dtype="fp32", bias=True, silu=False, dynamic=True, pending=16
    ),
    "conv_commit": _conv_golden("shift"),
    "conv_commit_layers_pending": _conv_golden("shift", 1, state_dtype="fp32", pending=16),
}

_TEMPLATE_HASH = re.compile(r"^# template hash: .*$", re.MULTILINE)


def golden_kernel(label: str) -> RenderedKernel:
    """Render the kernel of a golden file."""
    golden = GOLDENS[label]
    variant, limits = get_variant(golden.problem.op, golden.variant), gpus.get("h200").limits()
    config = variant.config({**variant.default(golden.problem, limits).as_dict(), **golden.changes})
    reason = variant.reason(golden.problem, config, limits)
    assert reason is None, f"{label}: {reason}"
    return render(golden.problem, config)[golden.index]


def golden_text(source: str) -> str:
    """Return a rendered file without the hash over all templates, which changes with every edit of any."""
    return _TEMPLATE_HASH.sub("# template hash: (of all templates)", source)
