"""What ``tree_conv`` and ``conv_commit`` write: memory of its own. Nothing runs where it is not so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import ConvFactors, ConvPending, TreeBatch, conv_commit, tree_conv
from bole_runtime.conv import api, prepare_conv_commit

B, N, C, W, SLOTS = 2, 3, 8, 4, 5
TREE = TreeBatch.chain(B, N)
SLOTS_OF = torch.tensor([0, 3])
ACCEPTED = torch.tensor([2, 1])


class _Reached(Exception):
    pass


@pytest.fixture(autouse=True)
def _nothing_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        @staticmethod
        def run(call: object) -> None:
            raise _Reached

        tree_conv = conv_commit = run

    monkeypatch.setitem(api._loaded, "torch", Backend)


def call(**change: Any) -> None:
    base: dict[str, Any] = {
        "x": torch.zeros(B, N, C),
        "weight": torch.zeros(C, W),
        "state": torch.zeros(SLOTS, C, W - 1),
        "slots": SLOTS_OF,
        "tree": TREE,
        **change,
    }
    tree_conv(base.pop("x"), base.pop("weight"), base.pop("bias", None), **base)


def ring(x: torch.Tensor | None = None, **change: torch.Tensor) -> ConvPending:
    counters = {name: torch.zeros(SLOTS, dtype=torch.int32) for name in ("length", "start")}
    return ConvPending(torch.zeros(SLOTS, 2, C) if x is None else x, **{**counters, **change})


def kept(x: torch.Tensor | None = None, pending: ConvPending | None = None) -> ConvFactors:
    return ConvFactors(torch.zeros(B, N, C) if x is None else x, W, TREE, pending)


def test_what_a_convolution_writes() -> None:
    flat = torch.zeros(4096)
    own = flat[: B * N * C].view(B, N, C)
    ints = flat.view(torch.int32)
    for name, written in (("out", {"out": own}), ("factors.x", {"factors": kept(own)})):
        for what, read in {
            "weight": {"weight": flat[8 : 8 + C * W].view(C, W)},
            "state": {"state": flat[: SLOTS * C * (W - 1)].view(SLOTS, C, W - 1)},
            "slots": {"slots": ints[:B]},
            "bias": {"bias": flat[20 : 20 + C]},
            "pending.x": {"pending": ring(flat[: SLOTS * 2 * C].view(SLOTS, 2, C))},
            "pending.length": {"pending": ring(length=ints[3 : 3 + SLOTS])},
            "pending.start": {"pending": ring(start=ints[3 : 3 + SLOTS])},
            "x": {"x": flat[C : C + B * N * C].view(B, N, C)},
        }.items():
            with pytest.raises(ValueError, match=rf"^({name}: overlaps {what}|{what}: overlaps {name}) in memory"):
                call(**written, **read)
    with pytest.raises(ValueError, match=r"^out: overlaps factors\.x in memory"):
        call(out=own, factors=kept(own))
    with pytest.raises(ValueError, match=r"^factors\.x: expanded"):
        call(factors=kept(torch.zeros(1, 1, C).expand(B, N, C)))
    with pytest.raises(ValueError, match=r"^factors\.x: is x itself"):
        call(x=own, factors=kept(own))


def test_ranges_of_columns_of_one_buffer_are_apart() -> None:
    both = torch.zeros(B, N, 2 * C)
    with pytest.raises(_Reached):
        call(x=both[..., :C], out=both[..., C:])
    with pytest.raises(_Reached):
        call(x=both[..., :C], factors=kept(both[..., C:]), pending=ring())
    with pytest.raises(ValueError, match="overlaps x in memory"):
        call(x=both[..., :C], out=both[..., C - 1 : -1])


def pools(layers: int = 1) -> list[torch.Tensor]:
    return list(torch.zeros(layers, SLOTS, C, W - 1).unbind())


def test_what_a_commit_writes() -> None:
    pool = torch.zeros(SLOTS, C, W - 1)
    flat = pool.view(-1)
    ints = flat.view(torch.int32)
    for part, what in (
        (kept(flat[16 : 16 + B * N * C].view(B, N, C)), r"factors\[1\]\.x"),
        (kept(pending=ring(flat[: SLOTS * 2 * C].view(SLOTS, 2, C))), r"factors\[1\]\.pending\.x"),
        (kept(pending=ring(length=ints[:SLOTS])), r"factors\[1\]\.pending\.length"),
        (kept(pending=ring(start=ints[-SLOTS:])), r"factors\[1\]\.pending\.start"),
    ):
        for run in (
            lambda part: conv_commit([pools()[0], pool], SLOTS_OF, [kept(), part], ACCEPTED),
            lambda part: prepare_conv_commit([pools()[0], pool], [kept(), part]),
        ):
            with pytest.raises(ValueError, match=rf"^pools\[1\]: overlaps {what} in memory"):
                run(part)
    with pytest.raises(ValueError, match=r"^pools\[0\]: overlaps pools\[1\] in memory"):
        conv_commit(
            list(torch.zeros(SLOTS + 1, C, W - 1).unfold(0, SLOTS, 1).movedim(-1, 1)), SLOTS_OF, [kept()] * 2, ACCEPTED
        )
    with pytest.raises(ValueError, match=r"^pools: overlaps slots in memory"):
        conv_commit(pool, ints[:B], kept(), ACCEPTED)
    with pytest.raises(ValueError, match=r"^pools: overlaps accepted in memory"):
        conv_commit(pool, SLOTS_OF, kept(), ints[:B])


def test_layers_of_one_buffer_and_turned_pools_are_apart() -> None:
    whole = torch.zeros(SLOTS, 3, W - 1, C).transpose(2, 3)
    with pytest.raises(_Reached):
        conv_commit(list(whole.unbind(1)), SLOTS_OF, [kept(pending=ring()) for _ in range(3)], ACCEPTED)
    with pytest.raises(_Reached):
        conv_commit(pools(3), SLOTS_OF, [kept() for _ in range(3)], ACCEPTED)
