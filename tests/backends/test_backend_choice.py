"""Which backend serves a call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from bole_testing.devices import by_device

from bole_runtime import TreeBatch, backend_choice, backends, commit, set_backend, verify

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BOLE_BACKEND", raising=False)
    set_backend(None)
    yield
    monkeypatch.undo()
    set_backend(None)


def test_the_device_decides() -> None:
    assert backends.backend_name(CPU) == "torch"
    assert backends.backend_name(CUDA) == "triton"


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_BACKEND", "reference")
    set_backend(None)
    assert backends.backend_name(CUDA) == "reference"
    assert backends.get_backend(CPU).name == "reference"


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown backend 'cuda'; allowed: triton, torch, reference"):
        set_backend("cuda")
    monkeypatch.setenv("BOLE_BACKEND", "numpy")
    set_backend(None)
    with pytest.raises(ValueError, match="BOLE_BACKEND: unknown backend 'numpy'"):
        backends.backend_name(CPU)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    set_backend("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        backends.backend_name(CPU)


def test_gpu_tests_have_kernels_on_the_gpu_and_compare_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_BACKEND", "reference")
    with by_device():
        assert backends.backend_name(CUDA) == "triton"
        assert backends.backend_name(CPU) == "torch"
    assert backends.backend_name(CUDA) == "reference"


def test_every_backend_is_known_by_name() -> None:
    from bole_runtime.conv import api

    assert tuple(backends.BACKENDS) == tuple(api.BACKENDS) == backend_choice.NAMES


def test_trees_and_sampling_import_no_backend() -> None:
    # Backends read trees: a tree that needed them to be imported would be a circle.
    code = (
        "import sys, bole_runtime.tree, bole_runtime.sampling\n"
        "print([m for m in sys.modules if m.startswith('bole_runtime.backends')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_and_reference_agree() -> None:
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2]]))
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 4, 1, 8, generator=gen, dtype=torch.float64)
    v = torch.randn(1, 4, 2, 8, generator=gen, dtype=torch.float64)
    gates = {"g": -torch.rand(1, 4, 2, generator=gen), "beta": torch.rand(1, 4, 2, generator=gen)}
    pool = torch.randn(2, 2, 8, 8, generator=gen, dtype=torch.float64)
    slots = torch.tensor([1])
    results = []
    for name in ("torch", "reference"):
        set_backend(name)
        out, factors = verify(q, k, v, gates=gates, state=pool, slots=slots, tree=tree)
        state = pool.clone()
        commit(state, slots, factors, torch.tensor([3]))
        results.append((out, state))
    # float64 in, float64 all the way.
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() < 1e-13 * b.norm()
