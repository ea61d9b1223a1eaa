"""What verify and commit return, alias, and leave alone."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest
import torch
from bole_testing.close import assert_same_bits

import bole_runtime
from bole_runtime import Factors, TreeBatch, api, commit, verify

TREE = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2]]))


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, object]:
    gen = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(1, 4, 1, 8, generator=gen).to(dtype),
        "k": torch.randn(1, 4, 1, 8, generator=gen).to(dtype),
        "v": torch.randn(1, 4, 2, 8, generator=gen).to(dtype),
        "gates": {"g": -torch.rand(1, 4, 2, generator=gen), "beta": torch.rand(1, 4, 2, generator=gen)},
        "state": torch.randn(3, 2, 8, 8, generator=gen),
        "slots": torch.tensor([1]),
        "tree": TREE,
    }


def test_output_dtype() -> None:
    args = arguments(torch.bfloat16)
    assert verify(**args)[0].dtype is torch.bfloat16
    assert verify(**args, out_dtype=torch.float32)[0].dtype is torch.float32
    out = torch.full((1, 4, 2, 8), float("nan"), dtype=torch.float16)
    assert verify(**args, out=out)[0] is out
    assert bool(torch.isfinite(out).all())


def test_factors_alias_the_inputs() -> None:
    args = arguments()
    _, factors = verify(**args)
    assert factors.k is args["k"]
    assert factors.v is args["v"]
    assert factors.gates["g"] is args["gates"]["g"]
    assert factors.tree is TREE
    args["gates"].clear()  # the caller's dict is its own
    commit(args["state"], args["slots"], factors, torch.tensor([3]))


def test_only_the_committed_slot_is_written() -> None:
    args = arguments()
    args["gates"]["beta"] = torch.nn.Parameter(args["gates"]["beta"])
    tensors = {name: t for name, t in {**args, **args["gates"]}.items() if isinstance(t, torch.Tensor)}
    before = {name: t.detach().clone() for name, t in tensors.items()}
    out, factors = verify(**args)
    assert not out.requires_grad
    for name, t in before.items():
        assert_same_bits(name, tensors[name].detach(), t)
    commit(args["state"], args["slots"], factors, torch.tensor([3]))
    changed = [s for s in range(3) if not torch.equal(args["state"][s], before["state"][s])]
    assert changed == [1]


def test_values_are_used_even_when_they_are_not_checked() -> None:
    args = arguments()
    checked, _ = verify(**args, validate=True)
    unchecked, _ = verify(**args, validate=False)
    assert_same_bits("output", unchecked, checked)


def test_a_slot_above_the_pool_is_padding_when_values_are_not_checked() -> None:
    args = {**arguments(), "slots": torch.tensor([3])}
    out, factors = verify(**args, validate=False)
    assert bool((out == 0).all())
    before = args["state"].clone()
    commit(args["state"], args["slots"], factors, torch.tensor([3]), validate=False)
    assert_same_bits("state", args["state"], before)


def test_a_batch_in_slices_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_runtime.backends import torch_backend

    gen = torch.Generator().manual_seed(1)
    tree = TreeBatch.chain(5, 3)
    args = {
        "q": torch.randn(5, 3, 1, 8, generator=gen),
        "k": torch.randn(5, 3, 1, 8, generator=gen),
        "v": torch.randn(5, 3, 2, 8, generator=gen),
        "gates": {"g": -torch.rand(5, 3, 2, generator=gen), "beta": torch.rand(5, 3, 2, generator=gen)},
        "slots": torch.arange(5),
        "tree": tree,
    }
    state = torch.randn(5, 2, 8, 8, generator=gen)
    accepted = torch.tensor([2, -1, 1, 0, 2])
    results = []
    # All at once, and two requests at a time: their states are larger than their Gram matrices.
    for limit in (1 << 28, 2 * 2 * 8 * 8 * 8):
        monkeypatch.setattr(torch_backend, "_MAX_BYTES", limit)
        pool = state.clone()
        out, factors = verify(**args, state=pool)
        commit(pool, args["slots"], factors, accepted)
        results.append((out, pool))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_bytes_of_a_node() -> None:
    # HK16, HV32, 128 x 128: k 4 KiB, v 8 KiB, g and beta 256 B, 12.5 kB in all.
    for tree in (TREE, TreeBatch.from_packed(torch.tensor([-1, 0]), torch.tensor([0, 2]), 2)):
        factors = Factors.allocate(tree, key_heads=16, value_heads=32, dk=128, dv=128)
        assert factors.nbytes_per_node == 4096 + 8192 + 256
    factors = verify(**arguments(torch.bfloat16))[1]
    assert factors.nbytes_per_node == 16 + 32 + 16


def test_the_example_in_the_docs() -> None:
    failed, tried = doctest.testmod(
        api, extraglobs={"torch": torch, "TreeBatch": TreeBatch, "verify": verify, "commit": commit}
    )
    assert tried > 0
    assert failed == 0


def test_public_names() -> None:
    assert set(bole_runtime.__all__) <= set(dir(bole_runtime))
    for name in bole_runtime.__all__:
        if name != "warmup" and name != "Config":
            assert getattr(bole_runtime, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'verfiy'"):
        bole_runtime.verfiy  # noqa: B018


@pytest.mark.parametrize("uses", ["import bole_runtime", "from bole_runtime import verify, commit, TreeBatch, Factors"])
def test_imports_stay_light(uses: str) -> None:
    code = f"import sys\n{uses}\nprint(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"optuna", "jinja2", "rich", "msgspec", "matplotlib", "bole_codegen"}
    # torch itself may load triton; nothing here asks for it on a machine that launches no kernel.
    bare = subprocess.run(
        [sys.executable, "-c", "import sys, torch\nprint('triton' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("triton" in loaded) == (bare.stdout.strip() == "True")
