"""The GPU bench's own logic, on a CPU: the torch backend plays the kernels and wall time the graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_plants import CorruptedBench

from bole_codegen.measure import CaptureError, Timing
from bole_codegen.search import bucket_inputs, gpu_bench
from bole_codegen.search.gpu_bench import GpuBench, classify
from bole_codegen.search.results import CandidateError, Failed, Timed
from bole_codegen.search.targets import Geometry, Target, make_targets
from bole_runtime.kernels.space import Config

# The torch backend, which stands for the device here, reads of a configuration only whose it is.
GOOD, BAD, BROKEN = (Config(name, ()) for name in ("fused", "two_stage", "chunked"))


class Graph:
    """A captured graph that is run eagerly."""

    def __init__(self, make: Any, layers: int) -> None:
        self.launches = [make(i) for i in range(layers)]
        for launch in self.launches:
            launch()
        self.layers = layers


@contextmanager
def capture(make: Any, layers: int, warmup: int = 2) -> Iterator[Graph]:
    try:
        yield Graph(make, layers)
    except ValueError as error:
        raise CaptureError(f"capture failed: {error}") from error


def interleaved(graphs: dict[str, Graph], replays: int = 20, warmup_ms: float = 0.0) -> dict[str, Timing]:
    found = {}
    for name, graph in graphs.items():
        begin = time.perf_counter()
        for launch in graph.launches:
            launch()
        found[name] = Timing.from_samples([(time.perf_counter() - begin) * 1e6], graph.layers)
    return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of a device as a bench asks for."""
    cuda = gpu_bench.torch.cuda
    for name, value in {
        "is_available": True,
        "set_device": None,
        "synchronize": None,
        "mem_get_info": (1 << 30, 1 << 30),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(cuda, name, lambda *args, value=value: value)


@pytest.fixture
def bench(cuda: None, monkeypatch: pytest.MonkeyPatch) -> GpuBench:
    monkeypatch.setattr(gpu_bench, "capture_layers", capture)
    monkeypatch.setattr(gpu_bench, "time_interleaved", interleaved)
    made = GpuBench(0, 0, 1 << 18)
    made._device = "cpu"
    real = bucket_inputs.Operands.verify

    def verify(self: Any, problem: Any, out: Any, config: Any, capture: Any = None) -> Any:
        if config == BROKEN:
            raise ValueError("cannot run")
        result = real(self, problem, out, None, capture)
        if config == BAD:
            result[0].mul_(1.5)
        return result

    monkeypatch.setattr(bucket_inputs.Operands, "verify", verify)
    return made


def targets(op: str, **changes: Any) -> tuple[Target, ...]:
    options: dict[str, Any] = {
        "ops": [op],
        "families": ["gdn"],
        "in_dtypes": ["bf16"],
        "state_dtypes": ["fp32"],
        "gate_modes": ["raw"],
        "precisions": ["fast", "lossless"],
        "nodes": [16],
        "batches": [2],
        "pendings": [0],
    }
    return make_targets([Geometry(1, 2, 32, 32)], **{**options, **changes})


@pytest.mark.parametrize("pending", [0, 16])
@pytest.mark.parametrize("op", ["verify", "commit"])
def test_screen_quick_finals_and_floor(bench: GpuBench, op: str, pending: int) -> None:
    fast, lossless = targets(op, pendings=[pending])
    good: Any = GOOD if op == "verify" else None
    assert bench.gate(fast.kernels, good) < 3e-3 + 4e-3
    assert bench.check(fast.kernels, good) < 3e-3
    if op == "verify":
        for call in (bench.gate, bench.check):
            with pytest.raises(CandidateError, match="relative error"):
                call(fast.kernels, BAD)
    for target in (fast, lossless):
        timed = bench.quick(target, GOOD if op == "verify" else None)  # type: ignore[arg-type]
        assert timed.median_us > 0
    assert len(bench._buckets) == 1  # Both profiles share their inputs.
    assert bench.floor_bytes(fast) > 0
    configs = [GOOD, BAD, BROKEN, GOOD] if op == "verify" else [None, None]
    results = bench.finals(fast, configs, 10)  # type: ignore[arg-type]
    if op == "verify":
        kinds = [r.kind if isinstance(r, Failed) else "ok" for r in results]
        assert kinds == ["ok", "wrong", "error", "ok"]
    assert all(r.median_us > 0 for r in results if isinstance(r, Timed))


def test_a_commit_counts_the_layers_of_its_launch(bench: GpuBench) -> None:
    (target, _) = targets("commit")
    timed = bench.quick(target, None)  # type: ignore[arg-type]
    assert timed.layers == 3 * bucket_inputs.COMMIT_LAYERS  # Three launches keep this state cold.


def test_buckets_are_dropped_when_memory_runs_short(bench: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = targets("verify", batches=[2, 4], precisions=["fast"])
    bench.quick(one, GOOD)
    monkeypatch.setattr(gpu_bench.torch.cuda, "mem_get_info", lambda: (1 << 28, 1 << 30))
    bench.quick(two, GOOD)
    assert [t.batch for t in bench._buckets] == [4]
    monkeypatch.setattr(gpu_bench.torch.cuda, "mem_get_info", lambda: (1 << 10, 1 << 30))
    (large,) = targets("verify", batches=[8], precisions=["fast"])
    with pytest.raises(CandidateError, match="one layer of this bucket needs"):
        bench.quick(large, GOOD)


def _chained(inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except Exception as error:
            raise CaptureError("warm-up failed") from error
    except CaptureError as error:
        return error


class OutOfResources(Exception):
    """As Triton's."""


class CompilationError(Exception):
    """As Triton's."""


@pytest.mark.parametrize(
    ("error", "kind", "fatal"),
    [
        (OutOfResources("out of resource: shared memory"), "resources", False),
        (CompilationError("at 3:4: bad"), "compile", False),
        (RuntimeError("PassManager::run failed"), "compile", False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal", True),
        (ValueError("x"), "error", False),
        (CandidateError("nan", "3 elements"), "nan", False),
    ],
)
def test_exceptions_become_kinds(error: Exception, kind: str, fatal: bool, bench: GpuBench) -> None:
    found = classify(error)
    assert (found.kind, found.fatal) == (kind, fatal)
    if not isinstance(error, CandidateError):
        assert classify(_chained(error)).kind == kind


def test_a_device_that_no_longer_answers_is_fatal(bench: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert classify(ValueError("x")).fatal
    assert classify(CandidateError("wrong", "x")).fatal


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(
    ("plant", "kind"),
    [("wrong", "wrong"), ("nan", "nan"), ("bounds", "bounds"), ("canary", "bounds"), ("races", "races")],
)
def test_what_the_gpu_tests_plant_is_what_the_check_sees(plant: str, kind: str, first: bool, cuda: None) -> None:
    bench = CorruptedBench({str(BAD): plant}, device=0, seed=0, l2_bytes=1 << 18)
    bench._device = "cpu"
    (target,) = make_targets(
        [Geometry(2, 4, 32, 48)], ops=["verify"], families=["gdn"], in_dtypes=["bf16"], state_dtypes=["fp32"],
        gate_modes=["raw"], precisions=["lossless"], nodes=[16], batches=[4], pendings=[0],
    )  # fmt: skip
    if not first:
        assert bench.gate(target.kernels, GOOD) < 1e-2
    with pytest.raises(CandidateError) as caught:
        bench.gate(target.kernels, BAD)
    assert caught.value.kind == kind, caught.value
