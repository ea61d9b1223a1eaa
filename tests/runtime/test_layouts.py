"""Sparse, opaque and nested tensors: one TypeError that names the argument and its layout, before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bole_runtime import Factors, PendingChain, TreeBatch, accept, commit, conv_commit, tree_conv, verify
from bole_runtime.state.operations import flush

B, N, HK, HV, DK, DV, SLOTS, CAP = 2, 4, 2, 2, 8, 6, 5, 3
TREE = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2]] * B))


def _nested(t: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That nested tensors are a prototype.
        return torch.nested.nested_tensor(list(t.unbind()), layout=layout)


#: Name to what makes the form of a dense tensor of ones.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "strided": lambda t: _nested(t, torch.strided),
    "jagged": lambda t: _nested(t, torch.jagged),
}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def chain() -> PendingChain:
    gates = {"g": ones(SLOTS, CAP, HV), "beta": ones(SLOTS, CAP, HV)}
    counters = torch.zeros(SLOTS, dtype=torch.int32)
    return PendingChain(ones(SLOTS, CAP, HK, DK), ones(SLOTS, CAP, HV, DV), gates, counters, counters.clone())


def arguments() -> dict[str, Any]:
    return {
        "q": ones(B, N, HK, DK), "k": ones(B, N, HK, DK), "v": ones(B, N, HV, DV),
        "gates": {"g": -ones(B, N, HV), "beta": ones(B, N, HV)}, "state": ones(SLOTS, HV, DV, DK),
        "slots": torch.tensor([3, 1]), "out": ones(B, N, HV, DV), "workspace": ones(64), "pending": chain(),
        "factors": Factors.allocate(TREE, key_heads=HK, value_heads=HV, dk=DK, dv=DV, dtype=torch.float32),
    }  # fmt: skip


def run(values: dict[str, Any]) -> Factors:
    values = dict(values)
    return verify(values.pop("q"), values.pop("k"), values.pop("v"), tree=TREE, **values)[1]


def changed(given: Any, path: str, form: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return arguments, factors or a chain with one tensor in another form."""
    head, _, rest = path.partition(".")
    old = given[head] if isinstance(given, dict) else getattr(given, head)
    new = changed(old, rest, form) if rest else form(torch.ones_like(old))
    return {**given, head: new} if isinstance(given, dict) else replace(given, **{head: new})


def forms(*paths: str) -> Iterator[Any]:
    for path in paths:
        for name in FORMS:
            yield pytest.param(path, name, id=f"{path}-{name}")


def refused(path: str, name: str, given: Any, call: Callable[[Any], object], shown: str) -> None:
    """Run ``call`` with one tensor of ``given`` in a form, where torch has that form of it."""
    try:
        given = changed(given, path, FORMS[name])
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"torch has none: {error}")
    with pytest.raises(TypeError, match=r"expected a dense tensor \(torch\.strided, not nested\), got ") as caught:
        call(given)
    nested = "nested, " if name in ("strided", "jagged") else ""
    layout = "torch._mkldnn" if name == "mkldnn" else f"torch.{name}"
    assert str(caught.value).startswith(f"{shown}: ")
    assert str(caught.value).endswith(f"got {nested}{layout}")


def bracketed(path: str) -> str:
    return path.replace("gates.g", "gates['g']").replace("gates.beta", "gates['beta']")


RINGS = ("pending.k", "pending.v", "pending.gates.beta", "pending.length", "pending.start")
BUFFERS = ("factors.k", "factors.v", "factors.gates.g")


@pytest.mark.parametrize(
    ("path", "name"),
    list(forms("q", "k", "v", "gates.g", "gates.beta", "state", "slots", "out", "workspace", *RINGS, *BUFFERS)),
)
def test_verify(path: str, name: str) -> None:
    refused(path, name, arguments(), run, bracketed(path))


PARTS = ("factors.k", "factors.v", "factors.gates.g", *(f"factors.{ring}" for ring in RINGS))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("path", "name"), list(forms("pool", "slots", "accepted", *PARTS)))
def test_commit(path: str, name: str, layer: int) -> None:
    counters = chain()

    def part() -> Factors:
        own = replace(chain(), length=counters.length, start=counters.start)
        return run({**arguments(), "factors": None, "out": None, "pending": own})

    pools, parts = [ones(SLOTS, HV, DV, DK) for _ in range(2)], [part(), part()]
    given: dict[str, Any] = {"pool": pools[layer], "factors": parts[layer]}
    given |= {"slots": torch.tensor([3, 1]), "accepted": torch.tensor([3, 3])}

    def call(values: dict[str, Any]) -> None:
        pools[layer], parts[layer] = values["pool"], values["factors"]
        commit(pools, values["slots"], parts, values["accepted"])

    place = bracketed(path).replace("factors", f"factors[{layer}]").replace("pool", f"pool[{layer}]")
    refused(path, name, given, call, place)


@pytest.mark.parametrize(("path", "name"), list(forms("x", "weight", "bias", "state", "slots", "out")))
def test_tree_conv(path: str, name: str) -> None:
    given = {
        "x": ones(B, N, 6), "weight": ones(6, 4), "bias": ones(6), "state": ones(SLOTS, 6, 3),
        "slots": torch.tensor([3, 1]), "out": ones(B, N, 6),
    }  # fmt: skip

    def call(values: dict[str, Any]) -> None:
        tree_conv(values.pop("x"), values.pop("weight"), values.pop("bias"), tree=TREE, **values)

    refused(path, name, given, call, path)


@pytest.mark.parametrize("name", FORMS)
def test_other_operations(name: str) -> None:
    _, factors = tree_conv(ones(B, N, 6), ones(6, 4), state=ones(SLOTS, 6, 3), slots=torch.tensor([3, 1]), tree=TREE)
    given = {
        "parents": torch.tensor([[-1, 0, 0, 2]] * B), "logits": ones(B, N, 7), "tokens": TREE.parents.long(),
        "slots": torch.tensor([3, 1]), "pools": ones(SLOTS, 6, 3), "x": factors.x,
    }  # fmt: skip

    def conv(values: dict[str, Any]) -> None:
        conv_commit([values["pools"]], given["slots"], [replace(factors, x=values["x"])], torch.tensor([3, 3]))

    calls: tuple[tuple[str, str, Callable[[dict[str, Any]], object]], ...] = (
        ("parents", "parents", lambda v: TreeBatch.from_parents(v["parents"])),
        ("logits", "logits", lambda v: accept(v["logits"], given["tokens"], TREE)),
        ("tokens", "tokens", lambda v: accept(given["logits"], v["tokens"], TREE)),
        ("slots", "slots", lambda v: flush(ones(SLOTS, HV, DV, DK), v["slots"], chain())),
        ("pools", "pools", conv),
        ("x", "factors[0].x", conv),
    )
    for path, shown, call in calls:
        try:
            changed(given, path, FORMS[name])
        except (RuntimeError, IndexError):
            continue  # torch has no such form of it.
        refused(path, name, given, call, shown)
