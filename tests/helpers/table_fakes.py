"""Small variants, GPUs and entries for the tests of tables and search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.tables.load import dump
from bole_runtime.tables.schema import SCHEMA_VERSION, Entry, Gpu, KernelRef, TableFile

LIMITS = GpuLimits(compute_capability=(9, 0), sms=132, smem_per_block=232448, l2_bytes=50 << 20, bandwidth_gbs=4800.0)
PROBLEM = Problem(
    op="verify",
    family="gdn",
    dk=128,
    dv=128,
    group=2,
    in_dtype="bf16",
    state_dtype="fp32",
    gate_mode="raw",
    precision="fast",
    nodes=16,
    depth=16,
    pending=0,
    work=32,
)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    need = config["BV"] * problem.dk * 4 * config["STAGES"]
    return f"needs {need} bytes of shared memory" if need > gpu.smem_per_block else None


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    return Config("fused", (("BV", 32), ("STAGES", 1), ("MODE", "rhs")))


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    context = {"BV": config["BV"], "MODE": config["MODE"]}
    return (KernelPlan("x.py.jinja", "x", context, num_warps=4, num_stages=config["STAGES"], arguments=()),)


FUSED = Variant(
    name="fused",
    op="verify",
    doc="one kernel",
    params=(
        Param("BV", (16, 32, 64, 128, 256), "value tile"),
        Param("STAGES", (1, 2, 3), "stages"),
        Param("MODE", ("rhs", "inverse"), "solve", ordered=False),
    ),
    applies=lambda problem: "too many nodes" if problem.nodes > 64 else None,
    check=_check,
    default=_default,
    plans=_plans,
    grids=lambda problem, config, batch, heads: ((batch * heads, -(-problem.dv // config["BV"])),),
    workspace=lambda problem, config, batch, heads: (0, 0),
)


def variants(op: str) -> tuple[Variant, ...]:
    return (FUSED,) if op == "verify" else ()


def gpus(name: str) -> tuple[str, tuple[str, ...]] | None:
    known: dict[str, tuple[str, tuple[str, ...]]] = {
        "NVIDIA H200": ("h200", ()),
        "NVIDIA H100 80GB HBM3": ("h100", ("h200",)),
    }
    return known.get(name)


def entry(problem: Problem = PROBLEM, params: dict[str, Any] | None = None, **changes: Any) -> Entry:
    values: dict[str, Any] = {
        **{f: getattr(problem, f) for f in Entry.__struct_fields__ if hasattr(problem, f)},
        "variant": "fused",
        "params": {"BV": 64, "STAGES": 1, "MODE": "rhs"} if params is None else params,
        "median_us": 5.5,
        "spread_us": 0.1,
        "floor_us": 4.0,
        "ratio": 1.375,
        "error": 1.5e-3,
        "default_us": 6.5,
        "runner_up": None,
        "margin": None,
        "kernels": [KernelRef(name="x", text_hash="0123456789abcdef")],
        "label": "measured",
        "trials": 12,
    }
    return Entry(**{**values, **changes})


def table(*entries: Entry, gpu: str = "h200", triton: str = "3.6.0") -> TableFile:
    return TableFile(
        schema_version=SCHEMA_VERSION,
        family="gdn",
        gpu=Gpu(
            key=gpu,
            device_name="NVIDIA H200",
            compute_capability=(9, 0),
            driver="570.1",
            cuda="13.0",
            triton=triton,
            torch="2.11.0",
            ptxas="13.0",
            clocks="1980 MHz",
        ),
        protocol="graph replay, cold L2",
        date="2026-01-02",
        entries=list(entries),
    )


def write(root: Path, *entries: Entry, gpu: str = "h200", triton: str = "3.6.0") -> Path:
    path = root / gpu / "gdn.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump(table(*entries, gpu=gpu, triton=triton)))
    return path


def edit(path: Path, change: Any) -> None:
    """Apply ``change`` to the parsed JSON of a file, by any means, schema or not."""
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))
