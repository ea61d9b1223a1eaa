"""Numeric cases: extreme gates, degenerate keys and queries, extreme inputs, garbage in rows that are not live."""

from __future__ import annotations

import random

import torch

from bole_testing.cases.base import (
    NAN,
    Case,
    Inputs,
    Setup,
    case,
    chain_tree,
    dense_tree,
    leaves,
    make_inputs,
    random_parents,
)
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.close import assert_close

CASES: list[Case] = []


def _both(setup: Setup, inputs: Inputs, sequential: bool = False) -> None:
    factors = check_verify(setup, inputs, sequential=sequential)
    check_commit(setup, inputs, factors, leaves(inputs.tree), sequential=sequential)


@case(CASES)
def constant_log_decay(setup: Setup) -> None:
    for value in (0.0, -3.0, -6.0, -20.0, -1000.0):
        inputs = make_inputs(setup, chain_tree(setup, 1, 16))
        inputs.gates["g"].fill_(value)
        _both(setup, inputs)


@case(CASES)
def mixed_log_decay(setup: Setup) -> None:
    values = torch.tensor([0.0, -3.0, -6.0, -20.0, -1000.0])
    for seed in range(3):
        inputs = make_inputs(setup, chain_tree(setup, 1, 16), seed=seed)
        pick = torch.randint(0, 5, inputs.gates["g"].shape, generator=torch.Generator().manual_seed(seed))
        inputs.gates["g"].copy_(values[pick])
        _both(setup, inputs)


@case(CASES)
def one_huge_log_decay_above_a_chain(setup: Setup) -> None:
    # Differences of a cumulative sum near -1000 lose digits in fp32 unless the sum is split.
    inputs = make_inputs(setup, chain_tree(setup, 1, 16))
    inputs.gates["g"].fill_(-0.0123)
    inputs.gates["g"][:, 1] = -1000.0
    _both(setup, inputs)


@case(CASES)
def log_decay_of_minus_infinity(setup: Setup) -> None:
    inputs = make_inputs(setup, chain_tree(setup, 1, 8))
    inputs.gates["g"][:, 3] = float("-inf")
    _both(setup, inputs)


def _repeated_keys(setup: Setup, nodes: int) -> None:
    # 1 and 2 are exact in any element type; a decay, and what is short of 2, are not, and are the same at every node.
    for beta, g in ((1.0, 0.0), (2.0, 0.0), (1.9, -0.05)):
        inputs = make_inputs(setup, chain_tree(setup, 1, nodes))
        inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
        inputs.gates["beta"].fill_(beta)
        inputs.gates["g"].fill_(g)
        _both(setup, inputs, sequential=True)
    if nodes == 16:  # kernels still exceed the bound from 32 nodes on, and the `path` commit at 16 too
        near_critical_keys(setup, nodes, sequential=True)


def near_critical_keys(setup: Setup, nodes: int, *, sequential: bool) -> None:
    """Run chains on nearly one key whose writes almost reflect the state: nothing dampens a rounding on its way down.

    Args:
        setup: the setup.
        nodes: of the chain.
        sequential: allow what the fp32 sequential recurrence gets wrong.
    """
    for beta, sign in ((1.97, 1), (1.99, 1), (1.999, -1), (2.0, 1)):
        for g in (0.0, -0.01):
            inputs = make_inputs(setup, chain_tree(setup, 1, nodes))
            shape = inputs.k.shape
            signs = torch.tensor([1.0, sign]).repeat(nodes)[:nodes].reshape(1, nodes, 1, 1)
            gen = torch.Generator().manual_seed(11)
            keys = torch.randn(1, 1, *shape[2:], generator=gen) + 0.03 * torch.randn(shape, generator=gen)
            inputs.k.copy_(keys * signs)
            inputs.gates["beta"].fill_(beta)
            inputs.gates["g"].fill_(g)
            _both(setup, inputs, sequential=sequential)


@case(CASES)
def repeated_keys_16(setup: Setup) -> None:
    _repeated_keys(setup, 16)


@case(CASES, cost="medium")
def repeated_keys_64(setup: Setup) -> None:
    _repeated_keys(setup, 64)


@case(CASES, cost="medium")
def repeated_keys_128(setup: Setup) -> None:
    _repeated_keys(setup, 128)


@case(CASES)
def beta_zero_only_decays(setup: Setup) -> None:
    inputs = make_inputs(setup, chain_tree(setup, 1, 5))
    inputs.gates["beta"].zero_()
    factors = check_verify(setup, inputs)
    pool = check_commit(setup, inputs, factors, [4])
    slot = int(inputs.slots[0])
    decay = inputs.gates["g"][0].double().sum(0).exp()[:, None, None]
    assert_close("decayed state", pool[slot], decay * inputs.state[slot].double(), setup.state_bound)


@case(CASES)
def beta_zero_and_no_decay_keep_the_state(setup: Setup) -> None:
    inputs = make_inputs(setup, chain_tree(setup, 1, 5))
    inputs.gates["beta"].zero_()
    inputs.gates["g"].zero_()
    factors = check_verify(setup, inputs)
    pool = check_commit(setup, inputs, factors, [4])
    slot = int(inputs.slots[0])
    if setup.precision == "lossless":
        assert torch.equal(pool[slot], inputs.state[slot])


@case(CASES)
def beta_one_and_two(setup: Setup) -> None:
    for beta in (1.0, 2.0):
        inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0, 1, 1, 2, 5, 6]]))
        inputs.gates["beta"].fill_(beta)
        _both(setup, inputs)


@case(CASES)
def repeated_keys_with_large_betas(setup: Setup) -> None:
    # Partial sums of a solve by depth reach 9e4, beyond fp16, in as few steps as need no cut while no beta is above 2.
    inputs = make_inputs(setup, chain_tree(setup, 1, 12))
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    inputs.q.copy_(inputs.k)
    inputs.gates["beta"].fill_(2.5)
    inputs.gates["g"].zero_()
    # The state grows as 1.5^12: small values keep it in the range of fp16.
    inputs.v.mul_(0.1)
    inputs.state.mul_(0.1)
    _both(setup, inputs, sequential=True)


@case(CASES)
def betas_that_only_decays_tame(setup: Setup) -> None:
    # One key in every node: values grow by |1 - beta| a node before decays, to 4e7 here, and shrink with them.
    for beta, g in ((4.0, -2.0), (-2.0, -2.0), (2.5, -1.0)):
        inputs = make_inputs(setup, chain_tree(setup, 1, 16))
        inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
        inputs.gates["beta"].fill_(beta)
        inputs.gates["beta"][:, 0] = 0.5
        inputs.gates["g"].fill_(g)
        _both(setup, inputs, sequential=True)


@case(CASES)
def zero_queries_give_zero(setup: Setup) -> None:
    inputs = make_inputs(setup, chain_tree(setup, 1, 6))
    inputs.q.zero_()
    out, _ = setup.verify(inputs.q, inputs.k, inputs.v, precision=setup.precision, **inputs.arguments)
    assert bool((out == 0).all())


@case(CASES)
def zero_keys_only_decay(setup: Setup) -> None:
    inputs = make_inputs(setup, chain_tree(setup, 1, 6))
    inputs.k.zero_()
    _both(setup, inputs)


@case(CASES)
def tiny_keys_meet_the_epsilon_inside_the_root(setup: Setup) -> None:
    # |k| = 1e-3, eps = 1e-6: the norm of the normalised key is 1 / sqrt(2).
    inputs = make_inputs(setup, chain_tree(setup, 1, 6), dims=(32, 32))
    if setup.in_dtype is torch.float16:
        return  # components of 1e-3 / sqrt(32) are subnormal there
    k = inputs.k.float()
    inputs.k.copy_(k / k.norm(dim=-1, keepdim=True) * 1e-3)
    _both(setup, inputs)


@case(CASES)
def fp32_gate_logits_are_not_rounded(setup: Setup) -> None:
    # sigmoid(6.01) and sigmoid(6.02) are one value in bf16 and in fp16.
    inputs = make_inputs(setup, chain_tree(setup, 1, 8), mode="raw")
    inputs.gates["b"].copy_(6.01 + 0.001 * torch.arange(8, device=setup.device).reshape(1, 8, 1).expand(1, 8, 4))
    _both(setup, inputs)


@case(CASES)
def raw_gates_of_every_size(setup: Setup) -> None:
    # softplus has no threshold: large, small and very negative arguments all keep their digits.
    inputs = make_inputs(setup, chain_tree(setup, 1, 8), mode="raw")
    values = torch.tensor([-100.0, -30.0, -5.0, 0.0, 5.0, 19.9, 20.1, 60.0], device=setup.device)
    inputs.gates["a"].copy_(values.reshape(1, 8, 1).expand(1, 8, 4))
    inputs.gates["A_log"].fill_(-4.0)
    inputs.gates["beta_scale"] = 2.0
    _both(setup, inputs)


@case(CASES, in_dtypes=(torch.float16, torch.bfloat16))
def inputs_near_the_largest_finite_value(setup: Setup) -> None:
    top = 65504.0 if setup.in_dtype is torch.float16 else 3e38
    inputs = make_inputs(setup, chain_tree(setup, 1, 4), dims=(16, 16))
    # The sum of squares overflows fp32 in bf16; the normalised key does not.
    for t in (inputs.q, inputs.k):
        t.copy_((torch.sign(t.float()) * top).to(setup.in_dtype))
    _both(setup, inputs)


@case(CASES, in_dtypes=(torch.float16,))
def fp16_values_near_65504(setup: Setup) -> None:
    inputs = make_inputs(setup, chain_tree(setup, 1, 4), dims=(16, 16))
    inputs.v.copy_((torch.sign(inputs.v.float()) * 65504.0).half())
    if setup.state_dtype is torch.float32:
        _both(setup, inputs)


@case(CASES)
def garbage_in_padding_nodes(setup: Setup) -> None:
    rng = random.Random(3)
    tree = dense_tree(setup, [random_parents(rng, 12, padding=0.4) for _ in range(3)])
    _both(setup, make_inputs(setup, tree))
    inputs = make_inputs(setup, tree, mode="raw")
    for t in (inputs.q, inputs.k, inputs.v, inputs.gates["a"], inputs.gates["b"]):
        t.copy_(torch.where(torch.isnan(t), torch.full_like(t, float("inf")), t))
    _both(setup, inputs)


@case(CASES)
def garbage_past_the_end_of_a_view(setup: Setup) -> None:
    # 13 nodes and head dims that no tile divides, inside larger tensors of NaN.
    tree = chain_tree(setup, 2, 13)
    inputs = make_inputs(setup, tree, dims=(24, 20))

    def inside(t: torch.Tensor, extra: int) -> torch.Tensor:
        big = torch.full([n + extra for n in t.shape], NAN, dtype=t.dtype, device=t.device)
        view = big[tuple(slice(0, n) for n in t.shape)]
        return view.copy_(t)

    inputs = inputs.replace(
        q=inside(inputs.q, 3),
        k=inside(inputs.k, 3),
        v=inside(inputs.v, 3),
        gates={name: inside(t, 3) for name, t in inputs.gates.items()},
        state=inside(inputs.state, 2),
    )
    out, factors = setup.verify(
        inputs.q, inputs.k, inputs.v, precision=setup.precision, out_dtype=torch.float32, **inputs.arguments
    )
    tight = inputs.replace(
        q=inputs.q.contiguous(),
        k=inputs.k.contiguous(),
        v=inputs.v.contiguous(),
        gates={name: t.contiguous() for name, t in inputs.gates.items()},
        state=inputs.state.contiguous(),
    )
    check_commit(setup, tight, check_verify(setup, tight), [12, 5])
    same, _ = setup.verify(
        tight.q, tight.k, tight.v, precision=setup.precision, out_dtype=torch.float32, **tight.arguments
    )
    assert_close("view", out, same, setup.output_bound)
    inputs.state.copy_(tight.state)
    setup.commit(
        inputs.state, inputs.slots, factors, torch.tensor([12, 5], device=setup.device), precision=setup.precision
    )
    assert bool(torch.isfinite(inputs.state[inputs.slots.long()]).all())


@case(CASES)
def without_l2norm_and_with_a_scale(setup: Setup) -> None:
    tree = dense_tree(setup, [[-1, 0, 0, 1, 2, 2]])
    inputs = make_inputs(setup, tree, qk_l2norm=False, scale=0.25)
    inputs.k.mul_(0.1)
    _both(setup, inputs)
