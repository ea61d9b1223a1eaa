"""The oracle itself: small sums by hand, and one token at a time in plain Python numbers."""

from __future__ import annotations

import math

import pytest
import torch

from bole_runtime import Factors, PendingChain, TreeBatch
from bole_runtime.families import get_family
from bole_runtime.reference import commit_sequential, verify_sequential


def scalar_step(state: float, k: float, v: float, g: float, beta: float) -> float:
    decayed = math.exp(g) * state
    return decayed + beta * (v - decayed * k) * k


def scalar_inputs(nodes: int) -> dict[str, torch.Tensor]:
    values = torch.arange(1, nodes + 1, dtype=torch.float64)
    return {
        "q": (values * 0.5).reshape(1, nodes, 1, 1),
        "k": (1 / values).reshape(1, nodes, 1, 1),
        "v": (values - 2).reshape(1, nodes, 1, 1),
        "g": (-values / 10).reshape(1, nodes, 1),
        "beta": (1 / (1 + values)).reshape(1, nodes, 1),
    }


def test_one_by_one_states_by_hand() -> None:
    x = scalar_inputs(5)
    parents = [-1, 0, 0, 1, 2]
    tree = TreeBatch.from_parents(torch.tensor([parents]))
    pool = torch.tensor([0.0, 3.0], dtype=torch.float64).reshape(2, 1, 1, 1)
    states: list[float] = []
    for i, p in enumerate(parents):
        before = 3.0 if p < 0 else states[p]
        states.append(scalar_step(before, *(x[n].flatten()[i].item() for n in ("k", "v", "g", "beta"))))
    slots = torch.tensor([1])
    gates = {"g": x["g"], "beta": x["beta"]}
    out = verify_sequential(
        x["q"], x["k"], x["v"], gates=gates, state=pool, slots=slots, tree=tree, qk_l2norm=False, scale=2.0
    )
    expected = [2 * s * q for s, q in zip(states, x["q"].flatten().tolist(), strict=True)]
    assert out.flatten().tolist() == pytest.approx(expected, rel=1e-14)
    factors = Factors(get_family("gdn"), "ready", x["k"], x["v"], gates, 1.0, False, tree)
    new = commit_sequential(pool, slots, factors, torch.tensor([4]))
    assert new.item() == pytest.approx(states[4], rel=1e-14)
    assert pool.flatten().tolist() == [0.0, 3.0]
    assert commit_sequential(pool, slots, factors, torch.tensor([-1])).item() == 3.0


def test_l2norm_and_default_scale() -> None:
    # One node, zero state, beta 1: o = (q . k) v with unit q and k, times dk ** -0.5.
    q = torch.tensor([3.0, 4.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    k = torch.tensor([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    out = verify_sequential(
        q,
        k,
        torch.tensor([10.0]).reshape(1, 1, 1, 1),
        gates={"g": torch.zeros(1, 1, 1), "beta": torch.ones(1, 1, 1)},
        state=torch.zeros(1, 1, 1, 4),
        slots=torch.tensor([0]),
        tree=TreeBatch.chain(1, 1),
    )
    assert out.item() == pytest.approx(0.5 * 0.6 * 10, rel=1e-5)


def test_key_norm_at_the_epsilon() -> None:
    k = torch.tensor([1e-3, 0.0]).reshape(1, 1, 1, 2)
    factors = Factors(
        get_family("gdn"),
        "ready",
        k,
        torch.ones(1, 1, 1, 1),
        {"g": torch.zeros(1, 1, 1), "beta": torch.ones(1, 1, 1)},
        1.0,
        True,
        TreeBatch.chain(1, 1),
    )
    new = commit_sequential(torch.zeros(1, 1, 1, 2), torch.tensor([0]), factors, torch.tensor([0]))
    assert new.flatten()[0].item() == pytest.approx(0.7071, abs=1e-4)


def test_a_pending_chain_is_a_prefix() -> None:
    x = scalar_inputs(4)
    pool = torch.full((1, 1, 1, 1), 3.0, dtype=torch.float64)
    whole = Factors(
        get_family("gdn"), "ready", x["k"], x["v"], {"g": x["g"], "beta": x["beta"]}, 1.0, False, TreeBatch.chain(1, 4)
    )
    expected = commit_sequential(pool, torch.tensor([0]), whole, torch.tensor([3]))
    ring = [2, 0, 1]  # rows of the ring of capacity 3 that hold tokens 1, 2 and 0: it starts at row 2

    def rows(t: torch.Tensor) -> torch.Tensor:
        made = torch.empty(1, 3, *t.shape[2:], dtype=t.dtype)
        made[0, ring] = t[0, :3]
        return made

    pending = PendingChain(
        rows(x["k"]),
        rows(x["v"]),
        {"g": rows(x["g"]), "beta": rows(x["beta"])},
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
    )
    last = Factors(
        get_family("gdn"),
        "ready",
        x["k"][:, 3:],
        x["v"][:, 3:],
        {"g": x["g"][:, 3:], "beta": x["beta"][:, 3:]},
        1.0,
        False,
        TreeBatch.chain(1, 1),
        pending,
    )
    assert torch.equal(commit_sequential(pool, torch.tensor([0]), last, torch.tensor([0])), expected)


def test_fp32_rounds_and_fp64_does_not() -> None:
    gen = torch.Generator().manual_seed(0)
    args = {
        "gates": {"g": -torch.rand(1, 30, 2, generator=gen), "beta": torch.rand(1, 30, 2, generator=gen)},
        "state": torch.randn(1, 2, 8, 8, generator=gen),
        "slots": torch.tensor([0]),
        "tree": TreeBatch.chain(1, 30),
    }
    q, k, v = (torch.randn(1, 30, h, 8, generator=gen) for h in (1, 1, 2))
    exact = verify_sequential(q, k, v, **args)
    single = verify_sequential(q, k, v, **args, dtype=torch.float32)
    error = (single.double() - exact).norm() / exact.norm()
    assert (exact.dtype, single.dtype) == (torch.float64, torch.float32)
    assert 1e-9 < error < 1e-6
