"""Timing summaries on the CPU; graph capture on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bole_codegen.measure import (
    CaptureError,
    Timing,
    capture_layers,
    copy_bandwidth,
    host_overhead_us,
    time_interleaved,
    time_launches,
)
from bole_codegen.measure.timing import _capturing, _rotated

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_timing_divides_by_layers_and_takes_the_median() -> None:
    t = Timing.from_samples([100.0, 200.0, 300.0, 400.0, 1000.0], layers=10)
    assert (t.median_us, t.min_us, t.layers, t.replays) == (30.0, 10.0, 10, 5)
    assert t.spread_us == pytest.approx(20.0)


def test_timing_of_one_sample_has_no_spread() -> None:
    assert Timing.from_samples([6.0], layers=2) == Timing(3.0, 0.0, 3.0, 2, 1)


@pytest.mark.parametrize(("samples", "layers"), [([], 1), ([1.0], 0)])
def test_timing_refuses_nothing_to_summarise(samples: list[float], layers: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Timing.from_samples(samples, layers)


def test_rotation_gives_every_candidate_every_place() -> None:
    names = ["a", "b", "c"]
    assert [_rotated(names, i)[0] for i in range(4)] == ["a", "b", "c", "a"]
    assert all(sorted(_rotated(names, i)) == names for i in range(5))


def test_host_overhead_counts_calls() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    t = host_overhead_us(call, calls=10, batches=4)
    assert count == 43
    assert (t.layers, t.replays) == (10, 4)
    assert 0 <= t.median_us < 1e3


def test_bad_counts_are_refused_before_a_device_is_needed() -> None:
    with pytest.raises(ValueError, match="layers, warmup"):
        capture_layers(lambda i: lambda: None, layers=0)
    with pytest.raises(ValueError, match="at least one graph"):
        time_interleaved({})


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA device"):
        time_launches(lambda i: lambda: None, layers=1)
    with pytest.raises(RuntimeError, match="CUDA device"):
        copy_bandwidth()


class FakeCuda:
    """As much of torch.cuda as a capture needs. A capture that is ``broken`` does not end, as on a device."""

    def __init__(self) -> None:
        self.state, self.pools, self.broken = {"capturing": False}, set(), False
        self.default_generators = [self]

    def graph_pool_handle(self) -> str:
        return "pool"

    def graphsafe_get_state(self) -> dict[str, bool]:
        return self.state

    def graphsafe_set_state(self, state: dict[str, bool]) -> None:
        self.state = state

    def clone_state(self) -> dict[str, bool]:
        return dict(self.state)

    @contextmanager
    def graph(self, graph: Any, pool: str, stream: Any) -> Iterator[None]:
        self.state["capturing"] = True
        self.pools.add(pool)
        graph.state = self.state
        try:
            yield
        finally:
            if self.broken:
                raise RuntimeError("capture invalidated")
            self.state["capturing"] = False
            self.pools.remove(pool)

    def end_pool(self, device: int, pool: str) -> None:
        if pool not in self.pools:
            raise RuntimeError("not recording")
        self.pools.remove(pool)


@pytest.mark.parametrize("broken", [False, True])
def test_a_capture_leaves_nothing_behind(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, graph, released = FakeCuda(), SimpleNamespace(), []
    cuda.broken = broken
    for name in ("default_generators", "graph_pool_handle", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_pool, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: released.append(args), raising=False)
    usual = cuda.state
    with pytest.raises(RuntimeError, match="invalidated") if broken else nullcontext(), _capturing(graph, None):  # type: ignore[arg-type]
        pass
    assert cuda.state is usual
    assert usual == {"capturing": False}
    assert graph.state is not usual
    assert not cuda.pools
    assert len(released) == broken


@pytest.mark.gpu
@needs_gpu
def test_graph_of_layers_runs_every_layer() -> None:
    xs = [torch.zeros(1024, device="cuda") for _ in range(5)]
    with capture_layers(lambda i: lambda: xs[i].add_(i + 1), layers=5, warmup=1) as graph:
        before = [float(x[0]) for x in xs]
        graph.replay()
        torch.cuda.synchronize()
        assert [float(x[0]) - b for x, b in zip(xs, before, strict=True)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(RuntimeError, match="closed"):
        graph.replay()


@pytest.mark.gpu
@needs_gpu
def test_interleaved_times_order_by_work() -> None:
    small, large = torch.randn(1 << 20, device="cuda"), torch.randn(1 << 27, device="cuda")
    with (
        capture_layers(lambda i: lambda: small.mul_(1), 4) as a,
        capture_layers(lambda i: lambda: large.mul_(1), 4) as b,
    ):
        times = time_interleaved({"small": a, "large": b}, replays=12)
    assert times["small"].median_us < times["large"].median_us
    assert times["large"].replays == 12


@pytest.mark.gpu
@needs_gpu
def test_failed_warm_up_and_capture_are_named() -> None:
    def boom() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(CaptureError, match="warm-up failed: RuntimeError: no such kernel"):
        capture_layers(lambda i: boom, 1)
    x = torch.ones(4, device="cuda")
    with capture_layers(lambda i: lambda: x.mul_(1), 1) as earlier:
        with pytest.raises(CaptureError, match="capture failed"):
            capture_layers(lambda i: lambda: float(x.sum()), 1)
        with pytest.raises(CaptureError, match="capture failed: RuntimeError: no such kernel"):
            capture_layers(lambda i: lambda: boom() if torch.cuda.is_current_stream_capturing() else None, 1)
        # Everything must still work after a failed capture: the device, random numbers, other graphs, new ones.
        assert float(x.sum()) == 4.0
        assert float(torch.rand(8, device="cuda").std()) > 0
        earlier.replay()
        with capture_layers(lambda i: lambda: x.add_(torch.ones_like(x)), 1, warmup=1) as later:
            later.replay()
            assert float(x.sum()) == 16.0  # a warm-up and two replays


@pytest.mark.gpu
@needs_gpu
def test_copy_bandwidth_is_plausible() -> None:
    assert 50 < copy_bandwidth(nbytes=1 << 28) < 20000
