"""What ``append`` and ``flush`` write: memory of its own. Nothing is written where it is not so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import Factors, PendingChain, TreeBatch, append, flush

B, N, H, D, SLOTS, RING = 2, 3, 2, 8, 4, 6
TREE = TreeBatch.chain(B, N)
SLOTS_OF, ACCEPTED = torch.tensor([0, 3]), torch.tensor([2, 1])


def chain(like: PendingChain | None = None, **change: Any) -> PendingChain:
    made: dict[str, Any] = {
        "k": torch.zeros(SLOTS, RING, H, D),
        "v": torch.zeros(SLOTS, RING, H, D),
        "gates": {"g": torch.zeros(SLOTS, RING, H), "beta": torch.zeros(SLOTS, RING, H)},
        "length": torch.zeros(SLOTS, dtype=torch.int32) if like is None else like.length,
        "start": torch.zeros(SLOTS, dtype=torch.int32) if like is None else like.start,
    }
    return PendingChain(**{**made, **change})


def factors(pending: PendingChain, **change: Any) -> Factors:
    sizes = {"key_heads": H, "value_heads": H, "dk": D, "dv": D}
    return Factors.allocate(TREE, **sizes, dtype=torch.float32).replace(pending=pending, **change)


def pool() -> torch.Tensor:
    return torch.zeros(SLOTS, H, D, D)


def test_rings_over_factors_and_one_another() -> None:
    first = chain()
    second = chain(first)
    rows = B * N * H * D
    of_ring = second.k.view(-1)[32 : 32 + rows].view(B, N, H, D)
    for change, what in (
        ({"k": of_ring}, "k"),
        ({"v": of_ring}, "v"),
        ({"gates": {"g": torch.zeros(B, N, H), "beta": of_ring.flatten(2)[..., :H]}}, r"gates\['beta'\]"),
    ):
        match = rf"^factors\[1\]\.pending\.k: overlaps factors\[1\]\.{what} in memory"
        with pytest.raises(ValueError, match=match):
            append([pool(), pool()], SLOTS_OF, [factors(first), factors(second, **change)], ACCEPTED)
    # Of another layer.
    with pytest.raises(ValueError, match=r"^factors\[1\]\.pending\.k: overlaps factors\[0\]\.k in memory"):
        append([pool(), pool()], SLOTS_OF, [factors(first, k=of_ring), factors(second)], ACCEPTED)
    with pytest.raises(ValueError, match=r"^factors\[0\]\.pending\.v: overlaps factors\[1\]\.pending\.v in memory"):
        append([pool(), pool()], SLOTS_OF, [factors(first), factors(chain(first, v=first.v))], ACCEPTED)
    with pytest.raises(ValueError, match=r"^factors\[0\]\.pending\.k: overlaps factors\[0\]\.pending\.v in memory"):
        append(pool(), SLOTS_OF, factors(chain(k=first.v, v=first.v)), ACCEPTED)
    with pytest.raises(ValueError, match=r"^factors\[0\]\.pending\.v: expanded"):
        append(pool(), SLOTS_OF, factors(chain(v=torch.zeros(SLOTS, 1, H, D).expand(-1, RING, -1, -1))), ACCEPTED)


def test_rings_and_counters_over_what_says_where_to_write() -> None:
    ring = torch.zeros(SLOTS, RING, H, D)
    ints = ring.view(-1).view(torch.int32)
    with pytest.raises(ValueError, match=r"^factors\[0\]\.pending\.k: overlaps slots in memory"):
        append(pool(), ints[:B], factors(chain(k=ring)), torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"^factors\[0\]\.pending\.k: overlaps accepted in memory"):
        append(pool(), SLOTS_OF, factors(chain(k=ring)), ints[4 : 4 + B])
    with pytest.raises(ValueError, match=r"^pending\.length: overlaps factors\[0\]\.pending\.k in memory"):
        append(pool(), SLOTS_OF, factors(chain(k=ring, length=ints[:SLOTS])), ACCEPTED)
    both = torch.zeros(SLOTS, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^pending\.length: overlaps pending\.start in memory"):
        append(pool(), SLOTS_OF, factors(chain(length=both, start=both)), ACCEPTED)
    state = pool()
    with pytest.raises(ValueError, match=r"^pool: overlaps accepted in memory"):
        append(state, SLOTS_OF, factors(chain()), state.view(-1).view(torch.int32)[:B])


def test_a_flush_over_what_it_reads() -> None:
    state, made = pool(), chain()
    ints = state.view(-1).view(torch.int32)
    with pytest.raises(ValueError, match=r"^pool: overlaps slots in memory"):
        flush(state, ints[: SLOTS - 1], made)
    with pytest.raises(ValueError, match=r"^pool: overlaps rows in memory"):
        flush(state, SLOTS_OF, made, ints[:B])
    ring = made.v.view(-1).view(torch.int32)
    with pytest.raises(ValueError, match=r"^pending\.start: overlaps pending\[0\]\.v in memory"):
        flush(state, SLOTS_OF, chain(v=made.v, start=ring[:SLOTS]))


def test_layers_side_by_side_are_apart() -> None:
    keys, values = torch.zeros(2, SLOTS, 2, RING, H, D).unbind()
    first = chain(k=keys[:, 0], v=values[:, 0])
    second = chain(first, k=keys[:, 1], v=values[:, 1])
    whole = torch.zeros(SLOTS, 2, H, D, D)
    append([whole[:, 0], whole[:, 1]], SLOTS_OF, [factors(first), factors(second)], ACCEPTED)
    assert first.length.tolist() == [3, 0, 0, 2]
    flush([whole[:, 0], whole[:, 1]], SLOTS_OF, [first, second])
    assert first.length.tolist() == [0, 0, 0, 0]
