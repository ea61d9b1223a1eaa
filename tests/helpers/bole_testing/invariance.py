"""Batch-invariant mode: one request, alone and among others, in trees of any capacity, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bole_runtime import LayerGeometry, StateManager, TreeBatch
from bole_testing.close import assert_same_bits

LAYER = LayerGeometry(1, 2, 16, 16, conv_width=4)


class Place(NamedTuple):
    """Where a request is: its row, and the capacities of the tree. ``total`` makes it a packed one."""

    row: int
    batch: int
    nodes: int
    depth: int
    total: int | None = None

    def tree(self, parents: Sequence[int], device: str) -> TreeBatch:
        """Return trees of these capacities, each with the same parents."""
        sizes: dict[str, Any] = {"max_depth": self.depth, "max_total": self.total, "device": device}
        tree = TreeBatch(self.batch, self.nodes, **sizes)
        if self.total is None:
            tree.update_(torch.tensor([[*parents, *[-2] * (self.nodes - len(parents))]] * self.batch, device=device))
        else:
            rest = [-2] * (self.total - self.batch * len(parents))
            offsets = torch.arange(self.batch + 1, device=device, dtype=torch.int32) * len(parents)
            tree.update_(torch.tensor([*parents] * self.batch + rest, device=device), offsets)
        return tree

    def spread(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return the nodes of every request in the layout of the tree; padding is NaN."""
        if self.total is None:
            shape: tuple[int, ...] = (self.batch, self.nodes, *rows[0].shape[1:])
            made = torch.full(shape, float("nan"))
            made[:, : rows[0].shape[0]] = torch.stack(rows)
            return made
        made = torch.full((self.total, *rows[0].shape[1:]), float("nan"))
        made[: self.batch * rows[0].shape[0]] = torch.cat(rows)
        return made

    def mine(self, out: torch.Tensor, nodes: int) -> torch.Tensor:
        """Return the output of the request's nodes."""
        return out[self.row, :nodes] if self.total is None else out[self.row * nodes : (self.row + 1) * nodes]


def _decay(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor.abs()


def check_batch_invariance(
    sizes: dict[str, Any],
    *,
    parents: Sequence[int] = (-1, 0, 0, 2),
    ends: Sequence[int] = (3, 1, 0, 2),
    places: Sequence[Place] = (Place(0, 1, 4, 2), Place(2, 4, 7, 6), Place(1, 2, 6, 3, 9)),
    layer: LayerGeometry = LAYER,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Run the same rounds of a request in several places and compare outputs and states.

    Args:
        sizes: of the manager, its policy among them.
        parents: of every tree.
        ends: accepted node of each round; chains of neighbours have another length.
        places: of the request, a run each.
        layer: with a convolution.
        dtype: of the inputs.
        device: of the manager.
    """
    results = []
    count, last = len(parents), len(parents) - 1
    for place in places:
        manager = StateManager([layer], dtype=dtype, device=device, batch_invariant=True, **sizes)
        mine = manager.allocate()
        others = [manager.allocate() for _ in range(place.batch - 1)]
        slots = torch.tensor([*others[: place.row], mine, *others[place.row :]], dtype=torch.int32, device=device)
        rnd = manager.round(place.tree(parents, device), slots)
        own, noise = torch.Generator().manual_seed(9), torch.Generator().manual_seed(place.row)
        raw = layer.gate_mode == "raw"
        fixed = {n: torch.zeros(layer.value_heads, device=device) for n in (("A_log", "dt_bias") if raw else ())}
        weight = torch.randn(layer.channels, layer.conv_width, generator=torch.Generator().manual_seed(5)).to(device)
        outputs = []
        for end in ends:
            drawn = []
            keys, each = (count, layer.key_heads, layer.dk), (count, layer.value_heads)
            shapes = ((count, layer.channels), keys, keys, (*each, layer.dv), each, each)
            for n, shape in enumerate(shapes):
                # Torch rounds a function differently by where an element lies in a vector: apply it before placing.
                rows = [torch.randn(*shape, generator=own if b == place.row else noise) for b in range(place.batch)]
                change = (torch.Tensor.clone,) * 4 + ((torch.Tensor.clone,) * 2 if raw else (_decay, torch.sigmoid))
                kind = dtype if raw or n < 4 else torch.float32
                drawn.append(place.spread([change[n](t) for t in rows]).to(device, kind))
            x, q, k, v, first, second = drawn
            gates = {"a": first, "b": second, **fixed} if raw else {"g": first, "beta": second}
            outputs.append(place.mine(rnd.conv(0, x, weight), count).flatten(1).float())
            outputs.append(place.mine(rnd.verify(0, q, k, v, gates=gates), count).flatten(1).float())
            accepted = [last] * place.row + [end] + [last] * (place.batch - place.row - 1)
            rnd.commit(torch.tensor(accepted, device=device))
        manager.materialise([mine])
        results.append((torch.cat(outputs, 1), manager.request.pools[0][mine]))
    for place, (out, state) in zip(places[1:], results[1:], strict=True):
        assert_same_bits(f"outputs of {place}", out, results[0][0])
        assert_same_bits(f"state of {place}", state, results[0][1])
