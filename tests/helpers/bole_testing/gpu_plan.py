"""What the GPU tests run: the same entries say which kernels to compile ahead (tools/precompile.py --tests).

Every entry runs on any device. Kernels are compiled for each problem, configuration, output type and layout, in
seconds each, so the entries share them: a case runs in the setting of a server and in others that take turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bole_runtime import TreeBatch
from bole_runtime.kernels import GpuLimits
from bole_testing.cases import ALL, Case
from bole_testing.cases.base import Inputs, Setup, dense_tree, make_inputs, random_parents
from bole_testing.cases.draws import Draw, run_draw
from bole_testing.families import run_family_draw
from bole_testing.pins import Pin, pin, pinned_setup

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_DISPATCH = Pin()
_SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


@dataclass(frozen=True)
class Setting:
    """Element types, a profile and a pinned configuration."""

    in_dtype: torch.dtype
    state_dtype: torch.dtype
    precision: str
    pin: Pin = _DISPATCH

    def __str__(self) -> str:
        return f"{_SHORT[self.in_dtype]}-s{_SHORT[self.state_dtype]}-{self.precision}-{self.pin}"

    def setup(self, device: torch.device | str, limits: GpuLimits | None = None) -> Setup:
        """Return the setup on a device; ``limits`` of a GPU that is not there."""
        return pinned_setup(self.pin, device, self.in_dtype, self.state_dtype, self.precision, limits)


SERVER = Setting(BF16, FP32, "lossless")
OTHERS = (
    Setting(BF16, FP32, "fast", Pin("two_stage", (("mix_store", "bf16"), ("pdl", True)))),
    Setting(FP32, FP32, "lossless", Pin("two_stage", commit=(("variant", "blocks"),))),
    Setting(FP16, FP32, "lossless", Pin("chunked", (("chunk", 16),))),
    Setting(BF16, BF16, "lossless", Pin("two_stage", (("share", True), ("row_block", 16), ("prepare_warps", 1)))),
    Setting(FP16, FP16, "fast", Pin("two_stage", (("programs", 128),), False, (("variant", "steps"), ("bv", 16)))),
    Setting(FP32, FP16, "fast", Pin("chunked")),
)


def cases() -> list[tuple[Case, Setting]]:
    """Return every case that is not large, with the settings it runs in."""
    plan = []
    for i, case in enumerate(c for c in ALL if c.cost != "large"):
        turns = [s for s in OTHERS[i % 6 :] + OTHERS[: i % 6] if case.applies(s.in_dtype)]
        if case.name == "sixty_four_rounds_do_not_drift":
            settings = [s for s in (SERVER, *OTHERS) if s.state_dtype is FP32]
        elif case.name.startswith(("dims_", "heads_", "nodes_", "element_types")):
            settings = [SERVER, turns[0]]  # kernels of its own in every setting
        else:
            settings = [SERVER, *turns[:2]]
        plan += [(case, s) for s in settings if case.applies(s.in_dtype)]
    for case in ALL:
        if case.cost == "large":
            plan += [(case, SERVER), (case, Setting(BF16, FP32, "fast", Pin("two_stage")))]
            plan += [(case, Setting(FP16, FP32, "lossless", Pin("chunked")))]
    return plan


@dataclass(frozen=True)
class VariantEntry:
    """A configuration to run on a problem that has everything in it, and then again and again for the same bits."""

    setting: Setting
    draw: Draw

    def __str__(self) -> str:
        return f"{self.setting}-{'x'.join(map(str, self.draw.dims))}-n{max(self.draw.sizes)}"


def make_entry(
    pinned: Pin,
    precision: str = "lossless",
    *,
    nodes: int = 16,
    dims: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (2, 4),
    types: tuple[torch.dtype, torch.dtype] = (BF16, FP32),
    mode: str = "raw",
    packed: bool = False,
    pending: int = 0,
    capture: bool = False,
) -> VariantEntry:
    """Return a configuration with trees of three sizes."""
    sizes = (nodes, max(1, nodes - 5), max(1, nodes // 2))
    return VariantEntry(
        Setting(*types, precision, pinned), Draw(nodes, sizes, packed, heads, dims, mode, 0.1, pending, True, capture)
    )


ODD = (100, 72)
WIDE = (200, 72)
_ONE_WARP = {"bv": 32, "step": 16, "chunk": 32, "slice": 32, "registers": 168, "warps": 1}
VARIANTS: tuple[VariantEntry, ...] = (
    make_entry(pin("fused", bv=16, warps=4, commit={"bv": 16, "chunk": 16})),
    make_entry(pin("fused", orient="state", bv=32, warps=2, prefetch=False), "fast"),
    make_entry(pin("fused", bv=128, warps=8, mix="bf16x3"), nodes=15),
    make_entry(pin("fused", bv=32, warps=4, mix="tf32"), "fast", nodes=60),
    make_entry(pin("fused", bv=32), nodes=9, dims=ODD, heads=(1, 3), packed=True, pending=5, capture=True),
    make_entry(pin("fused", orient="state", bv=16, warps=4), nodes=33, dims=ODD, types=(FP16, FP16), mode="ready"),
    make_entry(pin("two_stage", orient="nodes", bv=64, commit={"bv": 64, "step": 64, "chunk": 16, "warps": 4})),
    make_entry(pin("two_stage", pdl=True, mix_store="bf16", bv=128, warps=8, commit={"dot": "tf32"}), "fast"),
    make_entry(pin("two_stage", bk=128, stages=3, bv=64, warps=4, prefetch=False, programs=0), dims=WIDE),
    make_entry(
        pin("two_stage", bk=128, stages=2, bv=64, warps=4, prefetch=False, programs=0), "fast", nodes=60, dims=WIDE
    ),
    make_entry(pin("two_stage", programs=128, bv=128, warps=8), "fast", nodes=16, capture=True),
    make_entry(pin("two_stage", programs=128, bv=64, share=True), nodes=16, capture=True),
    make_entry(pin("two_stage", programs=128, bv=64, share=True), "fast", nodes=20, packed=True),
    make_entry(pin("two_stage", programs=128, bv=64, orient="state"), nodes=16, packed=True, capture=True),
    make_entry(pin("two_stage", programs=256, bv=64, solve="tf32x3", pdl=False, chain=False), nodes=32),
    make_entry(pin("two_stage", programs=128, bv=64, solve="tf32x3", mix_store="fp32"), "fast", nodes=30, pending=16),
    make_entry(pin("fused", bv=32, solve="fp16"), "fast", nodes=16),
    make_entry(pin("fused", bv=32, solve="fp16", stack=False), "fast", nodes=16),
    make_entry(pin("fused", bv=16, warps=1, solve="fp16x2"), nodes=16, packed=True, capture=True),
    make_entry(pin("fused", bv=16, solve="fp16x2"), nodes=32, pending=16),
    make_entry(pin("fused", bv=16, solve="tf32x3"), nodes=64),
    make_entry(pin("two_stage", gather="stacked", prepare_warps=1), "fast", nodes=16, capture=True),
    make_entry(pin("two_stage", gather="stacked", share=True), nodes=30, packed=True, capture=True),
    make_entry(pin("two_stage", gather="apart"), nodes=16, dims=ODD),
    make_entry(pin("two_stage", gather="together", row_block=64, prepare_warps=4, solve="fp16"), "fast", nodes=64),
    make_entry(pin("two_stage", row_block=64, prepare_warps=4, gather="stacked", solve="fp16"), "fast", nodes=64),
    make_entry(pin("two_stage", row_block=64, prepare_warps=8, solve="fp16x2"), nodes=64),
    make_entry(pin("two_stage", row_block=128, prepare_warps=8, solve="fp16x2"), nodes=100),
    make_entry(pin("two_stage", share=True, row_block=16, prepare_warps=1, pdl=True), nodes=63, packed=True),
    make_entry(pin("two_stage", row_block=32, prepare_warps=4, share=False), nodes=64, types=(BF16, BF16)),
    make_entry(pin("two_stage", row_block=32, prepare_warps=4, share=True, mix="bf16x3"), nodes=64, pending=16),
    make_entry(pin("two_stage", row_block=32, prepare_warps=2, bv=32), nodes=120, heads=(1, 2), mode="ready"),
    make_entry(pin("two_stage", chain=False, share=True, programs=128, bv=64), "fast", nodes=16, packed=True),
    make_entry(pin("fused", bv=64, stack=True), "fast", nodes=64),
    make_entry(
        pin("two_stage", bk=128, stages=2, bv=64, programs=0),
        "fast",
        nodes=21,
        dims=WIDE,
        heads=(1, 3),
        types=(FP32, FP32),
    ),
    make_entry(
        pin("two_stage", prefetch=True, bv=32), nodes=11, dims=ODD, types=(FP16, FP32), packed=True, capture=True
    ),
    make_entry(pin("two_stage", share=True, commit={"variant": "steps", "bv": 32, "warps": 2, "tiles": 1}), nodes=63),
    make_entry(pin("two_stage", commit={"variant": "steps", "bv": 16, "warps": 1, "tiles": 8}), nodes=40, packed=True),
    make_entry(
        pin("two_stage", commit={"variant": "steps", "bv": 32, "warps": 2, "tiles": 2}), dims=ODD, types=(FP32, FP32)
    ),
    make_entry(pin("two_stage", commit={"variant": "steps", "bv": 16, "tiles": 4}), "fast", types=(BF16, BF16)),
    make_entry(
        pin("two_stage", commit={"variant": "blocks", "block": 4, "bv": 16, "warps": 1}), nodes=30, capture=True
    ),
    make_entry(
        pin("fused", commit={"variant": "blocks", "block": 8, "bv": 32}), nodes=16, dims=ODD, pending=16, packed=True
    ),
    make_entry(pin("two_stage", commit={"variant": "blocks", "block": 2}), "fast", nodes=21, types=(BF16, BF16)),
    make_entry(pin("two_stage", orient="state"), nodes=33, dims=ODD, heads=(1, 3), types=(FP16, FP32), packed=True),
    make_entry(pin("chunked", chunk=16, bv=32, commit=_ONE_WARP), nodes=40, pending=16, capture=True),
    make_entry(pin("two_stage", commit={"variant": "path"}), "fast", nodes=16, pending=16, capture=True),
    # A chain and nodes in 16 rows.
    make_entry(pin("two_stage"), "fast", nodes=8, pending=8, capture=True),
    make_entry(pin("two_stage", share=True), nodes=8, pending=8, types=(BF16, BF16)),
    make_entry(pin("fused", bv=32), nodes=8, pending=8, packed=True, capture=True),
    make_entry(pin("chunked", chunk=32, bv=64, warps=8), "fast", nodes=129, heads=(1, 2), mode="ready"),
    make_entry(pin("chunked", chunk=32, bv=16, warps=2), nodes=100, packed=True, mode="ready"),
    make_entry(pin("chunked", chunk=16, bv=16), nodes=35, dims=ODD, heads=(1, 3), types=(FP32, FP16), mode="ready"),
    make_entry(pin("two_stage_blocks"), nodes=129, capture=True),
    make_entry(pin("two_stage_blocks", block=64, share=True), "fast", nodes=200, packed=True, capture=True),
    make_entry(pin("two_stage_blocks", row_block=16, prepare_warps=1, block=32, bv=32), nodes=120, pending=16),
    make_entry(pin("two_stage_blocks", block=64), "fast", nodes=140, types=(BF16, BF16), mode="ready"),
    make_entry(
        pin("two_stage_blocks", block=16),
        nodes=131,
        dims=ODD,
        heads=(1, 3),
        types=(FP32, FP16),
        mode="ready",
        packed=True,
    ),
    make_entry(pin("four_stage"), nodes=129, capture=True),
    make_entry(pin("four_stage"), "fast", nodes=200, packed=True, capture=True),
    make_entry(pin("four_stage", unroll=1, bv=32), "fast", nodes=120, pending=16),
    make_entry(pin("four_stage", unroll=4, bv=32, mix="tf32x3", solve="tf32x3"), nodes=140, mode="ready"),
    make_entry(pin("four_stage", inverse_warps=1, solve_warps=1, row_warps=1), "fast", nodes=256, types=(BF16, BF16)),
    make_entry(
        pin("four_stage", row_block=16, row_warps=1, inverse_warps=1, solve_warps=1, bv=32),
        nodes=131,
        dims=ODD,
        heads=(1, 3),
        types=(FP32, FP16),
        mode="ready",
        packed=True,
    ),
)


@dataclass(frozen=True)
class FamilyEntry:
    """A family other than Gated DeltaNet, on a configuration."""

    family: str
    entry: VariantEntry

    def __str__(self) -> str:
        return f"{self.family}-{self.entry.draw.mode}-{self.entry}"

    def run(self, setup: Setup) -> None:
        """Verify and commit its problem and compare both with the float64 recurrence."""
        run_family_draw(setup, self.family, self.entry.draw)


_SSD = {"dims": (128, 64), "heads": (1, 16)}
_STEPS, _PATH = {"variant": "steps"}, {"variant": "path"}
_BLOCKS, _TILES = {"variant": "blocks", "block": 2}, {"variant": "steps", "bv": 16, "warps": 1, "tiles": 4}
_HALVES = pin("two_stage_slices", halves=True, slice=16, prepare_warps=1, commit=_STEPS)
_BY_PAIRS = pin("three_stage_blocks", commit=_STEPS)
_SMALL_PAIRS = pin(
    "three_stage_blocks", row_block=16, slice=16, prepare_warps=1, sum_slice=32, sum_warps=1, bv=32, commit=_STEPS
)
FAMILIES: tuple[FamilyEntry, ...] = (
    FamilyEntry("mamba2", make_entry(pin("fused", commit=_STEPS), **_SSD)),
    FamilyEntry(
        "mamba2", make_entry(pin("fused", bv=64, commit=_PATH), "fast", nodes=33, **_SSD, packed=True, capture=True)
    ),
    FamilyEntry(
        "mamba2", make_entry(pin("two_stage", orient="state"), "fast", nodes=30, dims=(128, 80), types=(BF16, BF16))
    ),
    FamilyEntry("mamba2", make_entry(pin("two_stage", bv=32, pdl=True), nodes=16, **_SSD, pending=16, mode="ready")),
    FamilyEntry("mamba2", make_entry(pin("chunked", chunk=32), nodes=129, **_SSD)),
    FamilyEntry("mamba2", make_entry(pin("two_stage_blocks"), "fast", nodes=129, **_SSD, packed=True, capture=True)),
    FamilyEntry("mamba2", make_entry(pin("four_stage"), nodes=129, **_SSD, packed=True, capture=True)),
    FamilyEntry("deltanet", make_entry(pin("four_stage"), "fast", nodes=110, mode="ready", pending=16, capture=True)),
    FamilyEntry("lightning", make_entry(pin("fused", commit=_STEPS), mode="ready")),
    FamilyEntry("mamba2", make_entry(pin("fused", commit=_TILES), **_SSD)),
    FamilyEntry("kda", make_entry(pin("slices", commit=_TILES), heads=(2, 2), mode="ready")),
    FamilyEntry(
        "lightning", make_entry(pin("two_stage", programs=128, bv=64, commit=_PATH), "fast", mode="ready", pending=16)
    ),
    FamilyEntry("lightning", make_entry(pin("two_stage", row_block=32, prepare_warps=2), nodes=64, mode="ready")),
    FamilyEntry("retention", make_entry(pin("two_stage", orient="nodes"), nodes=16, dims=(128, 256), mode="ready")),
    FamilyEntry(
        "simple_gla", make_entry(pin("fused", orient="state", bv=32), nodes=20, dims=ODD, pending=5, capture=True)
    ),
    FamilyEntry("simple_gla", make_entry(pin("two_stage", prefetch=True), "fast", types=(FP16, FP16))),
    FamilyEntry(
        "linear_attention", make_entry(pin("fused", bv=64), "fast", nodes=60, mode="ready", types=(FP32, FP32))
    ),
    FamilyEntry("deltanet", make_entry(pin("fused", bv=64, commit=_STEPS), "fast", nodes=60, heads=(2, 2))),
    FamilyEntry(
        "deltanet", make_entry(pin("fused", bv=32, commit=_PATH), nodes=20, dims=ODD, heads=(1, 1), packed=True)
    ),
    FamilyEntry("deltanet", make_entry(pin("two_stage", programs=128, bv=64), mode="ready", pending=16, capture=True)),
    FamilyEntry("deltanet", make_entry(pin("two_stage", row_block=32, prepare_warps=2), nodes=64, types=(FP16, FP16))),
    FamilyEntry("deltanet", make_entry(pin("chunked", chunk=32, bv=64, warps=8), "fast", nodes=100, mode="ready")),
    FamilyEntry("kda", make_entry(pin("slices", commit=_STEPS), heads=(2, 2), mode="ready", capture=True)),
    FamilyEntry("kda", make_entry(pin("slices", bv=64, orient="nodes", commit=_STEPS), "fast", nodes=30, heads=(2, 2))),
    FamilyEntry("kda", make_entry(pin("slices", bv=32, commit=_STEPS), nodes=20, dims=ODD, heads=(1, 3), packed=True)),
    FamilyEntry("kda", make_entry(pin("slices", bv=32, commit=_STEPS), types=(FP16, FP16), pending=16, capture=True)),
    FamilyEntry("kda", make_entry(pin("slices", bv=32, commit=_BLOCKS), nodes=16, heads=(2, 2), capture=True)),
    FamilyEntry("mamba2", make_entry(pin("fused", commit=_BLOCKS), **_SSD, capture=True)),
    FamilyEntry(
        "kda", make_entry(pin("slices", bv=64, commit=_STEPS), "fast", nodes=30, types=(FP32, FP32), mode="ready")
    ),
    FamilyEntry("kda", make_entry(pin("slices", bv=64, stages=2, commit=_STEPS), nodes=16, heads=(2, 2), capture=True)),
    FamilyEntry("kda", make_entry(pin("slices", bv=128, stages=3, commit=_STEPS), "fast", nodes=30, heads=(2, 2))),
    FamilyEntry("gla", make_entry(pin("slices", bv=64, commit=_STEPS), mode="ready", pending=16)),
    FamilyEntry(
        "kda", make_entry(pin("two_stage_slices", commit=_STEPS), "fast", nodes=16, heads=(2, 2), capture=True)
    ),
    FamilyEntry("kda", make_entry(pin("two_stage_slices", programs=128, prefetch=False, commit=_STEPS), nodes=16)),
    FamilyEntry(
        "kda", make_entry(pin("two_stage_slices", slice=16, commit=_STEPS), nodes=60, heads=(2, 2), mode="ready")
    ),
    FamilyEntry("kda", make_entry(pin("two_stage_slices", slice=32, commit=_STEPS), "fast", nodes=60, packed=True)),
    FamilyEntry("kda", make_entry(pin("two_stage_slices", prepare_registers=168, commit=_STEPS), "fast", nodes=60)),
    FamilyEntry("kda", make_entry(_HALVES, "fast", nodes=30, capture=True)),
    FamilyEntry("kda", make_entry(_HALVES, nodes=12, pending=16)),
    FamilyEntry(
        "kda", make_entry(pin("two_stage_slices", commit=_STEPS), types=(FP16, FP16), pending=16, capture=True)
    ),
    FamilyEntry("gla", make_entry(pin("two_stage_slices", commit=_STEPS), "fast", nodes=30, dims=ODD, heads=(1, 3))),
    FamilyEntry("gla", make_entry(pin("slices", bv=64, orient="nodes", commit=_STEPS), "fast", nodes=31, capture=True)),
    FamilyEntry("gdn2", make_entry(pin("slices", commit=_STEPS), nodes=16, heads=(2, 2), capture=True)),
    FamilyEntry("gdn2", make_entry(pin("slices", commit=_STEPS), "fast", nodes=30, heads=(2, 2), mode="ready")),
    FamilyEntry("comba", make_entry(pin("slices", commit=_STEPS), pending=16, capture=True)),
    FamilyEntry("comba", make_entry(pin("slices", bv=32, commit=_STEPS), "fast", nodes=20, dims=ODD, packed=True)),
    FamilyEntry("rwkv7", make_entry(pin("slices", commit=_STEPS), nodes=16, dims=(64, 64), heads=(2, 2), capture=True)),
    FamilyEntry("rwkv7", make_entry(pin("slices", commit=_STEPS), "fast", nodes=30, dims=(64, 64), mode="ready")),
    FamilyEntry("kda", make_entry(_BY_PAIRS, nodes=128, heads=(2, 2), capture=True)),
    FamilyEntry("kda", make_entry(_BY_PAIRS, "fast", nodes=256, heads=(2, 2), packed=True)),
    FamilyEntry("kda", make_entry(_BY_PAIRS, nodes=120, mode="ready", pending=16, types=(BF16, BF16))),
    FamilyEntry("kda", make_entry(_SMALL_PAIRS, "fast", nodes=100, dims=ODD, heads=(1, 3), types=(FP16, FP16))),
    FamilyEntry("kda", make_entry(_SMALL_PAIRS, nodes=129, packed=True, capture=True)),
    FamilyEntry("gla", make_entry(_BY_PAIRS, "fast", nodes=128, pending=16, capture=True)),
    FamilyEntry("gla", make_entry(_BY_PAIRS, nodes=100, dims=ODD, heads=(1, 3), types=(FP32, FP32))),
    FamilyEntry("gdn2", make_entry(_BY_PAIRS, nodes=64, heads=(2, 2), capture=True)),
    FamilyEntry("gdn2", make_entry(_BY_PAIRS, "fast", nodes=128, heads=(2, 2), mode="ready", packed=True)),
    FamilyEntry("gdn2", make_entry(_SMALL_PAIRS, nodes=60, heads=(2, 2), pending=16)),
    FamilyEntry("comba", make_entry(_BY_PAIRS, nodes=64, pending=16, capture=True)),
    FamilyEntry("comba", make_entry(_BY_PAIRS, "fast", nodes=128, dims=ODD, packed=True)),
    FamilyEntry("rwkv7", make_entry(_BY_PAIRS, nodes=64, dims=(64, 64), heads=(2, 2), capture=True)),
    FamilyEntry("rwkv7", make_entry(_BY_PAIRS, "fast", nodes=128, dims=(64, 64), mode="ready", pending=16)),
    FamilyEntry("rwkv7", make_entry(_SMALL_PAIRS, nodes=60, dims=(64, 64), heads=(2, 2), types=(FP32, FP32))),
)


@dataclass(frozen=True)
class RandomClass:
    """Random problems that share kernels."""

    setting: Setting
    max_nodes: int
    dims: tuple[int, int]
    heads: tuple[int, int]
    mode: str
    pending: int = 0
    capture: bool = False

    def __str__(self) -> str:
        return f"{self.setting}-{'x'.join(map(str, self.dims))}-n{self.max_nodes}"

    def draw(self, packed: bool) -> Draw:
        """Return one problem of the class."""
        sizes = (self.max_nodes, 3)
        return Draw(1, sizes, packed, self.heads, self.dims, self.mode, 0.1, self.pending, True, self.capture)


# Below a bucket's size, as a packed tree gets a few nodes more.
RANDOM: tuple[RandomClass, ...] = (
    RandomClass(SERVER, 14, (128, 128), (2, 4), "raw"),
    RandomClass(Setting(BF16, FP32, "fast", Pin("two_stage")), 60, (128, 128), (2, 4), "raw"),
    RandomClass(Setting(BF16, FP32, "lossless", Pin("two_stage")), 14, (128, 128), (2, 4), "raw", pending=16),
    RandomClass(Setting(FP32, FP32, "lossless", Pin("two_stage")), 30, (40, 72), (1, 3), "ready", capture=True),
    RandomClass(Setting(FP16, FP16, "fast", Pin("chunked")), 126, (64, 64), (1, 2), "ready"),
    RandomClass(Setting(BF16, BF16, "lossless", Pin("fused")), 30, (96, 128), (1, 1), "raw", pending=5),
)

#: What is captured in CUDA graphs.
CAPTURED = (SERVER, Setting(BF16, FP32, "fast", Pin("two_stage", (("pdl", True),))))
GRAPH_NODES = 16


def graph_tree(setup: Setup, batch: int, seed: int = 0) -> TreeBatch:
    """Return random trees of the graph tests."""
    rng = random.Random(seed)
    return dense_tree(setup, [random_parents(rng, GRAPH_NODES) for _ in range(batch)])


def graph_layer(setup: Setup, tree: TreeBatch, seed: int = 0) -> Inputs:
    """Return a layer of the shape that the graph tests capture: dense, 128 x 128, raw gates in the inputs' type."""
    inputs = make_inputs(setup, tree, dims=(128, 128), mode="raw", seed=seed)
    gates = {name: t.to(setup.in_dtype) if t.dim() > 1 else t for name, t in inputs.gates.items()}
    return inputs.replace(gates=gates)


def graph_calls(setup: Setup) -> None:
    """Make every call of the graph tests once."""
    tree = graph_tree(setup, 4)
    layers = [graph_layer(setup, tree, seed) for seed in range(2)]
    factors = []
    for layer in layers:
        out = torch.empty_like(layer.v)
        factors.append(setup.verify(layer.q, layer.k, layer.v, out=out, **layer.arguments)[1])
    accepted = torch.tensor([0, -1, 0, 0], dtype=torch.int32, device=setup.device)
    pools = [layer.state.clone() for layer in layers]
    setup.commit(pools[0], layers[0].slots, factors[0], accepted)
    setup.commit(pools, layers[0].slots, factors, accepted)


def bodies(device: torch.device | str, limits: GpuLimits) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a function for everything that reaches a kernel the GPU tests compile."""
    for case, setting in cases():
        yield f"{case.name} {setting}", lambda c=case, s=setting: c.body(s.setup(device, limits))
    for entry in VARIANTS:
        yield str(entry), lambda e=entry: run_draw(e.setting.setup(device, limits), e.draw)
    from bole_testing.gpu_geometries import GEOMETRIES

    for family in (*FAMILIES, *GEOMETRIES):
        yield str(family), lambda e=family: e.run(e.entry.setting.setup(device, limits))
    for kind in RANDOM:
        for packed in (False, True):
            yield str(kind), lambda k=kind, p=packed: run_draw(k.setting.setup(device, limits), k.draw(p))
    for setting in CAPTURED:
        yield f"graph {setting}", lambda s=setting: graph_calls(s.setup(device, limits))
    from bole_testing.gpu_states import CAPACITIES, POLICIES, bucket_rounds, state_rounds

    for policy in POLICIES:
        yield f"state {policy}", lambda p=policy: state_rounds(str(device), p).play()
        for which in range(len(CAPACITIES)):
            yield f"state {policy} {which}", lambda p=policy, w=which: bucket_rounds(str(device), p).play(w)
