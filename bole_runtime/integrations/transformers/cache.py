"""Keys and values of the attention layers in columns that stay where they are: texts first, then trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.sampling import Acceptance
from bole_runtime.tree import TreeBatch

#: Fewest columns for texts, and up to where there are twice as many each time they do not suffice.
FEWEST, DOUBLED = 128, 4096


def columns_for(tokens: int) -> int:
    """Return for how many tokens of a text a cache is made that must hold ``tokens``: few distinct numbers."""
    if tokens > DOUBLED:
        return -(-tokens // DOUBLED) * DOUBLED
    return max(FEWEST, 1 << (tokens - 1).bit_length())


class TreeCache:
    """Stands in for a transformers cache, whose attention layers call :meth:`update` alone.

    Row b holds ``lengths[b]`` committed tokens in its first columns. The nodes of a round are in the columns from
    ``room`` on, whatever the lengths. After sampling, :meth:`keep` copies the accepted path of each row behind its
    committed tokens. Shapes and addresses change with ``room`` alone, so that a CUDA graph can hold a round.

    Attributes:
        lengths: int64 [B], committed tokens of each row.
        room: columns for committed tokens.
        nodes: most nodes of a tree.
    """

    def __init__(self, batch: int, nodes: int, device: torch.device) -> None:
        """Make an empty cache.

        Args:
            batch: rows.
            nodes: most nodes of a tree.
            device: where everything is.
        """
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.room, self.nodes = 0, nodes
        # By index of the layer; [B, heads, room + nodes, D], of what the layer calls keys and values.
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Make room for texts of so many tokens; what is committed stays."""
        if tokens <= self.room:
            return
        room, before = columns_for(tokens), self.room
        for side in (self._keys, self._values):
            for n, old in side.items():
                side[n] = old.new_zeros(*old.shape[:2], room + self.nodes, old.shape[3])
                side[n][:, :, :before] = old[:, :, :before]
        self.room = room

    def fill(
        self, attention: Sequence[int], keys: Sequence[Sequence[torch.Tensor]], values: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Take the keys and values of one prompt a row; what was there before is gone.

        Args:
            attention: index of each attention layer.
            keys: by row and attention layer, [1, heads, P, D].
            values: likewise.
        """
        lengths = [row[0].shape[2] for row in keys]
        self.reserve(max(lengths))
        self.lengths.copy_(torch.tensor(lengths))
        for mine, given in ((self._keys, keys), (self._values, values)):
            for m, n in enumerate(attention):
                first = given[0][m]
                if n not in mine:
                    shape = (len(given), first.shape[1], self.room + self.nodes, first.shape[3])
                    # Columns that nobody wrote are masked, and zero times what they hold must be zero.
                    mine[n] = first.new_zeros(shape)
                for b, row in enumerate(given):
                    mine[n][b, :, : lengths[b]] = row[m][0]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the nodes of a round in one layer, [B, heads, N, D]; return all columns that can be attended to."""
        end = self.room + keys.shape[2]
        mine, own = self._keys[layer], self._values[layer]
        mine[:, :, self.room : end] = keys
        own[:, :, self.room : end] = values
        return mine[:, :, :end], own[:, :, :end]

    def mask(self, tree: TreeBatch) -> torch.Tensor:
        """Return which columns each node attends to, bool [B, 1, N, room + N].

        A node sees the committed tokens of its row, its ancestors and itself; so does a padding node, whose output
        nobody reads, but whose softmax must not be empty.
        """
        nodes = tree.max_nodes
        past = torch.arange(self.room, device=self.lengths.device) < self.lengths[:, None]
        own = tree.mask() | torch.eye(nodes, dtype=torch.bool, device=tree.device)
        return torch.cat((past[:, None].expand(-1, nodes, -1), own), -1)[:, None]

    def positions(self, tree: TreeBatch) -> torch.Tensor:
        """Return the position of each node in its text, int64 [B, N]: siblings share one."""
        return self.lengths[:, None] + tree.depths.clamp(min=0)

    def keep(self, got: Acceptance) -> None:
        """Copy accepted paths behind the committed tokens, for which there must be room. Reads nothing on the host.

        Args:
            got: of the round, over a dense tree.
        """
        path = got.path.long()
        live = path >= 0
        steps = torch.arange(path.shape[1], device=path.device)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        source = torch.where(live, self.room + path, 0)
        # What is not on the path writes column 0 to itself.
        target = torch.where(live, self.lengths[:, None] + steps, 0)
        for side in (self._keys, self._values):
            for tensor in side.values():
                tensor[rows, :, target] = tensor[rows, :, source]
        self.lengths += got.lengths
