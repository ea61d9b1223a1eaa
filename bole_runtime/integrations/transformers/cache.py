"""Keys and values of the attention layers: rows of unequal length, trees at the end, accepted paths moved together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bole_runtime.sampling import Acceptance
from bole_runtime.tree import TreeBatch


class TreeCache:
    """A transformers cache whose row b holds ``lengths[b]`` committed tokens in its first columns.

    The nodes of a round are appended behind the longest row, by the model itself. After sampling, :meth:`keep` moves
    the accepted path of each row behind its committed tokens and drops the rest.

    Attributes:
        store: the cache that the model's attention layers update.
        lengths: int64 [B], committed tokens of each row.
        width: columns kept, the longest row.
    """

    def __init__(
        self,
        store: Any,
        attention: Sequence[int],
        keys: Sequence[Sequence[torch.Tensor]],
        values: Sequence[Sequence[torch.Tensor]],
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        """Take the keys and values of prompts.

        Args:
            store: a new ``DynamicCache``.
            attention: index of each attention layer.
            keys: by row and attention layer, [1, heads, P, D].
            values: likewise.
            lengths: of the prompts.
            device: where ``lengths`` go.
        """
        self.store = store
        self._layers = [store.layers[n] for n in attention]
        self.width = max(lengths)
        self.lengths = torch.tensor(list(lengths), device=device)
        for m, n in enumerate(attention):
            store.update(*(torch.cat([_padded(row[m], self.width) for row in side]) for side in (keys, values)), n)

    def mask(self, tree: TreeBatch) -> torch.Tensor:
        """Return which columns each node attends to, bool [B, 1, N, width + N].

        A node sees the committed tokens of its row, its ancestors and itself; so does a padding node, whose output
        nobody reads, but whose softmax must not be empty.
        """
        nodes = tree.max_nodes
        past = torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]
        own = tree.mask() | torch.eye(nodes, dtype=torch.bool, device=tree.device)
        return torch.cat((past[:, None].expand(-1, nodes, -1), own), -1)[:, None]

    def positions(self, tree: TreeBatch) -> torch.Tensor:
        """Return the position of each node in its text, int64 [B, N]: siblings share one."""
        return self.lengths[:, None] + tree.depths.clamp(min=0)

    def keep(self, got: Acceptance, width: int) -> None:
        """Move accepted paths behind the committed tokens and drop all other nodes.

        Args:
            got: of the round, over a dense tree.
            width: longest row afterwards.
        """
        path = got.path.long()
        live = path >= 0
        steps = torch.arange(path.shape[1], device=path.device)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        source = torch.where(live, self.width + path, 0)
        # What is not on the path writes column 0 to itself: fixed shapes, no read of the device.
        target = torch.where(live, self.lengths[:, None] + steps, 0)
        for layer in self._layers:
            for tensor in (layer.keys, layer.values):
                tensor[rows, :, target] = tensor[rows, :, source]
            layer.keys, layer.values = layer.keys[:, :, :width], layer.values[:, :, :width]
        self.lengths = self.lengths + got.lengths
        self.width = width


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, width - tensor.shape[2]))
