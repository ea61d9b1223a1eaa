"""What a call writes: memory of its own, and no element twice. Nothing runs where it is not so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import Factors, PendingChain, TreeBatch, backends, commit, verify
from bole_runtime.validate_memory import check_apart, extent

B, N, HK, HV, D, SLOTS = 2, 4, 2, 4, 16, 5
TREE = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2]] * B))
OWN = (B, N, HV, D)


@pytest.fixture(autouse=True)
def _nothing_may_run(monkeypatch: pytest.MonkeyPatch):
    def run(call: object) -> None:
        raise AssertionError("the backend was reached")

    monkeypatch.setitem(backends._loaded, "torch", backends.Backend("torch", run, run))


def call(**change: Any) -> None:
    base: dict[str, Any] = {
        "q": torch.zeros(B, N, HK, D),
        "k": torch.zeros(B, N, HK, D),
        "v": torch.zeros(OWN),
        "gates": {"g": torch.zeros(B, N, HV), "beta": torch.zeros(B, N, HV)},
        "state": torch.zeros(SLOTS, HV, D, D),
        "slots": torch.tensor([3, 1]),
        "tree": TREE,
        **change,
    }
    verify(base.pop("q"), base.pop("k"), base.pop("v"), **base)


def buffers(**change: Any) -> Factors:
    sizes = {"key_heads": HK, "value_heads": HV, "dk": D, "dv": D}
    return Factors.allocate(TREE, **sizes, dtype=torch.float32).replace(**change)


def chain(capacity: int = 3, **change: Any) -> PendingChain:
    lead = (SLOTS, capacity)
    made: dict[str, Any] = {
        "k": torch.zeros(*lead, HK, D),
        "v": torch.zeros(*lead, HV, D),
        "gates": {"g": torch.zeros(*lead, HV), "beta": torch.zeros(*lead, HV)},
        "length": torch.zeros(SLOTS, dtype=torch.int32),
        "start": torch.zeros(SLOTS, dtype=torch.int32),
    }
    return PendingChain(**{**made, **change})


def reached(**change: Any) -> None:
    with pytest.raises(AssertionError, match="the backend was reached"):
        call(**change)


def test_a_workspace_is_one_run_of_fp32_elements() -> None:
    memory = torch.zeros(64)
    for view in (memory[:1].expand(64), memory[::2], torch.zeros(8, 8).mT, torch.zeros(8, 9)[:, :8]):
        with pytest.raises(ValueError, match="workspace: must be contiguous"):
            call(workspace=view)
    small = torch.zeros(64, dtype=torch.uint8)
    for view in (small[:63], small[1:61], small.view(torch.int16)[1:]):
        with pytest.raises(ValueError, match=r"workspace: .* must be multiples of 4 bytes"):
            call(workspace=view)
    odd = torch.frombuffer(bytearray(65), dtype=torch.uint8, offset=1)[:64]
    if odd.data_ptr() % 4:
        with pytest.raises(ValueError, match=r"workspace: address .* is not aligned to 4 bytes"):
            call(workspace=odd)
    for fine in (memory, memory[3:], small, small[4:60], torch.zeros(8, 8).double(), torch.zeros(0)):
        reached(workspace=fine)
    shared = torch.zeros(OWN)
    with pytest.raises(ValueError, match="workspace: overlaps v in memory"):
        call(v=shared, workspace=shared)


def test_an_output_over_buffers_chains_and_slots() -> None:
    out = torch.zeros(OWN)
    flat = out.view(-1)
    rows = B * N * HV
    gates = {"g": flat[:rows].view(B, N, HV), "beta": flat[rows : 2 * rows].view(B, N, HV)}
    with pytest.raises(ValueError, match=r"out: overlaps factors\.gates\['g'\] in memory"):
        call(out=out, factors=buffers(gates=gates))
    with pytest.raises(ValueError, match=r"out: overlaps pending\.k in memory"):
        call(out=out, pending=chain(1, k=flat[: SLOTS * HK * D].view(SLOTS, 1, HK, D)))
    with pytest.raises(ValueError, match=r"out: overlaps pending\.v in memory"):
        call(out=out, pending=chain(1, v=flat[: SLOTS * HV * D].view(SLOTS, 1, HV, D)))
    with pytest.raises(ValueError, match=r"out: overlaps pending\.length in memory"):
        call(out=out, pending=chain(length=flat.view(torch.int32)[:SLOTS]))
    with pytest.raises(ValueError, match="out: overlaps slots in memory"):
        call(out=out, slots=flat.view(torch.int32)[:B])


def test_an_output_over_itself() -> None:
    with pytest.raises(ValueError, match="out: overlaps itself"):
        call(out=torch.zeros(4096).as_strided(OWN, (64, 32, 8, 1)))
    with pytest.raises(ValueError, match="out: expanded"):
        call(out=torch.zeros(1, 1, HV, D).expand(OWN))
    reached(out=torch.zeros(N, B, HV, 2 * D).transpose(0, 1)[..., :D])


def test_buffers_over_inputs_and_over_one_another() -> None:
    q, state, made = torch.zeros(B, N, HK, D), torch.zeros(SLOTS, HV, D, D), buffers()
    with pytest.raises(ValueError, match=r"factors\.k: overlaps q in memory"):
        call(q=q, factors=buffers(k=q))
    with pytest.raises(ValueError, match=r"factors\.k: overlaps k in memory"):
        call(k=q, factors=buffers(k=q))
    with pytest.raises(ValueError, match=r"factors\.v: overlaps state in memory"):
        call(state=state, factors=buffers(v=state.view(-1)[64 : 64 + made.v.numel()].view(OWN)))
    with pytest.raises(ValueError, match=r"factors\.k: overlaps factors\.v in memory"):
        call(factors=made.replace(k=made.v.view(-1)[: made.k.numel()].view_as(made.k)))
    with pytest.raises(ValueError, match=r"factors\.k: expanded"):
        call(factors=made.replace(k=torch.zeros(1, 1, HK, D).expand(B, N, HK, D)))
    gates = {"g": made.gates["g"], "beta": made.gates["g"]}
    with pytest.raises(ValueError, match=r"factors\.gates\['g'\]: overlaps factors\.gates\['beta'\] in memory"):
        call(factors=made.replace(gates=gates))


def test_views_side_by_side_are_apart() -> None:
    heads = 2 * HK + HV
    packed = torch.zeros(B, N, heads * D)
    q, k, v = (t.unflatten(-1, (-1, D)) for t in packed.split((HK * D, HK * D, HV * D), -1))
    reached(q=q, k=k, v=v, out=torch.zeros(OWN), factors=buffers())
    kept = torch.zeros(B, N, (HK + HV) * D)
    parts = (t.unflatten(-1, (-1, D)) for t in kept.split((HK * D, HV * D), -1))
    made = buffers(**dict(zip("kv", parts, strict=True)))
    reached(q=q, k=k, v=v, factors=made)
    crossing = kept[..., D : (1 + HV) * D].unflatten(-1, (-1, D))
    with pytest.raises(ValueError, match=r"factors\.k: overlaps factors\.v in memory"):
        call(factors=made.replace(v=crossing))


def commits(pools: list[torch.Tensor], **change: Any) -> None:
    # Each layer has factors of its own: they are read, and may be anywhere.
    commit(pools, torch.tensor([3, 1]), [buffers(**change) for _ in pools], torch.tensor([1, 1]))


def test_pools_of_a_commit() -> None:
    big = torch.zeros(8, HV, D, D)
    with pytest.raises(ValueError, match=r"pool\[0\]: overlaps pool\[1\] in memory"):
        commits([big[:SLOTS], big[2 : 2 + SLOTS]])
    with pytest.raises(ValueError, match="pool: overlaps itself"):
        commits([torch.zeros(4096).as_strided((SLOTS, HV, D, D), (D * D, D * D, D, 1))])
    with pytest.raises(ValueError, match="pool: overlaps itself"):
        commits([torch.zeros(8192).as_strided((SLOTS, HV, D, D), (HV * D * D - 1, D * D, D, 1))])
    side = torch.zeros(SLOTS, 3, HV, D, D)
    with pytest.raises(AssertionError, match="the backend was reached"):
        commits([side[:, n] for n in range(3)])
    with pytest.raises(ValueError, match=r"pool\[0\]: overlaps pool\[3\] in memory"):
        commits([*(side[:, n] for n in range(3)), side.flatten(1, 2)[:, 1 : 1 + HV]])


def test_a_pool_over_factors() -> None:
    pool = torch.zeros(SLOTS, HV, D, D)
    flat = pool.view(-1)
    with pytest.raises(ValueError, match=r"pool: overlaps factors\[0\]\.v in memory"):
        commits([pool], v=flat[: B * N * HV * D].view(OWN))
    gates = {"g": torch.zeros(B, N, HV), "beta": flat[-B * N * HV :].view(B, N, HV)}
    with pytest.raises(ValueError, match=r"pool: overlaps factors\[0\]\.gates\['beta'\] in memory"):
        commits([pool], gates=gates)
    ring = flat[: SLOTS * 3 * HK * D].view(SLOTS, 3, HK, D)
    with pytest.raises(ValueError, match=r"pool: overlaps factors\[0\]\.pending\.k in memory"):
        commits([pool], pending=chain(k=ring))


def bytes_of(t: torch.Tensor) -> set[int]:
    offsets = torch.zeros(1, dtype=torch.long)
    for n, s in zip(t.shape, t.stride(), strict=True):
        offsets = (offsets.unsqueeze(-1) + torch.arange(n) * s).flatten()
    first = (offsets * t.element_size() + t.data_ptr()).tolist()
    return {at + byte for at in first for byte in range(t.element_size())}


def test_random_slices_that_share_an_element_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)

    def some(high: int) -> int:
        return int(torch.randint(0, high, (), generator=generator))

    memory, refused = torch.zeros(6, 5, 8), 0
    for _ in range(600):
        views = []
        for _ in range(3):
            begin = [some(n) for n in memory.shape]
            t = memory[tuple(slice(b, b + 1 + some(4)) for b in begin)]
            views.append(t.permute(*torch.randperm(3, generator=generator)))
        a, b, c = (bytes_of(t) for t in views)
        assert max(a) + 1 - min(a) == extent(views[0])
        try:
            check_apart([("a", views[0]), ("b", views[1])], [("c", views[2])])
        except ValueError:
            refused += 1
        else:
            assert not (a & b) | (a & c) | (b & c)
    assert 0 < refused < 600
