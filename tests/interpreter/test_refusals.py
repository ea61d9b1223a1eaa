"""What the interpreter would get wrong is refused: its product of bf16 operands is that of their bits."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import chain_tree, make_inputs
from bole_testing.pins import pin, pinned_setup

from bole_runtime import commit, verify, warmup

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]


def test_bf16_inputs() -> None:
    setup = pinned_setup(pin(), "cpu", torch.bfloat16, torch.float32, "lossless")
    inputs = make_inputs(setup, chain_tree(setup, 1, 3))
    with pytest.raises(TypeError, match=r"bfloat16 inputs on a CPU: Triton's interpreter multiplies .* as raw bits"):
        verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    from bole_runtime import set_backend

    set_backend("torch")
    _, factors = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    set_backend("triton")
    before = inputs.state.clone()
    with pytest.raises(TypeError, match="bfloat16 inputs on a CPU"):
        commit(inputs.state, inputs.slots, factors, torch.tensor([2]))
    assert torch.equal(before.view(torch.uint8), inputs.state.view(torch.uint8))


@pytest.mark.parametrize(
    "pinned",
    [pin("two_stage", mix="bf16"), pin("fused", mix="bf16"), pin("two_stage", pdl=True)],
    ids=str,
)
def test_pinned_configurations(pinned) -> None:
    setup = pinned_setup(pinned, "cpu", torch.float32, torch.float32, "fast")
    inputs = make_inputs(setup, chain_tree(setup, 1, 3))
    with pytest.raises(ValueError, match=r"variant: .* raw bits.* no programmatic launch"):
        setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)


def test_products_of_three_terms() -> None:
    setup = pinned_setup(pin("fused", mix="bf16x3"), "cpu", torch.float32, torch.float32, "lossless")
    inputs = make_inputs(setup, chain_tree(setup, 1, 3))
    with pytest.raises(ValueError, match=r"variant: .* raw bits"):
        setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)


def test_the_profile_runs_with_its_other_products() -> None:
    setup = pinned_setup(pin(), "cpu", torch.float32, torch.float32, "fast")
    inputs = make_inputs(setup, chain_tree(setup, 1, 3))
    out, _ = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    assert bool(torch.isfinite(out).all())


def test_fp64_factors() -> None:
    setup = pinned_setup(pin(), "cpu", torch.float64, torch.float32, "lossless")
    inputs = make_inputs(setup, chain_tree(setup, 1, 3))
    from bole_runtime import set_backend

    set_backend("torch")
    _, factors = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    set_backend("triton")
    with pytest.raises(TypeError, match=r"factors\[0\]\.k: dtype torch\.float64 is served by the torch and reference"):
        commit(inputs.state, inputs.slots, factors, torch.tensor([2]))


@pytest.mark.parametrize("name", ["dtype", "state_dtype"])
def test_a_warmup_for_fp64(name: str) -> None:
    sizes = {"key_heads": 1, "value_heads": 1, "dk": 16, "dv": 16, "max_batch": 1, "max_nodes": 4}
    types = {"dtype": torch.float32, name: torch.float64}
    with pytest.raises(TypeError, match=rf"^{name}: torch\.float64 is served by the torch and reference backends only"):
        warmup(**sizes, **types, device="cpu")
