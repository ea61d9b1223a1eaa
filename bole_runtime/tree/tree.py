"""TreeBatch: the proposal trees of a batch."""

from __future__ import annotations

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.tree.access import mask_of, path_of, rows_of
from bole_runtime.tree.build_torch import PADDING, as_int32, words_of
from bole_runtime.tree.check import check_capacity, check_index_tensor, checks_values
from bole_runtime.tree.links import parents_from_links, parents_from_table
from bole_runtime.tree.update import plan, store

#: Largest number of nodes of one request.
MAX_NODES = 512


class TreeBatch:
    """Proposal trees (or forests) of a batch: device tensors that can change in place, host capacities that cannot.

    Nodes are in topological order, parent before child. A parent of -1 marks a root (child of the committed state,
    plus the pending chain), -2 a padding node. Dense trees have ``max_nodes`` rows a request; packed trees put node i
    of request b in row ``offsets[b] + i`` and keep parents request-local. Launches are chosen from the capacities
    alone, so a captured CUDA graph stays valid while the topology changes in place through :meth:`update_`.

    On a device without validation an invalid node (parent not before child, parent that is no live node, more than
    ``max_depth`` strict ancestors, row beyond ``max_nodes``) becomes padding together with its descendants, and
    ``status`` says why.

    Attributes:
        parents: int32 [max_batch, max_nodes], or packed [max_total]. Without validation what was given is kept, also of
            nodes that are none; int64 values beyond int32 become its ends.
        ancestors: int32 words, [max_batch, max_nodes, W] or packed [max_total, W], W = ceil(max_nodes / 32),
            contiguous. Bit j % 32 of word j // 32 in row i is set iff node j is i or a strict ancestor of i. All zero
            in padding rows.
        depths: int32, number of strict ancestors; -1 in padding rows.
        offsets: None, or int32 [max_batch + 1]; after a build within 0 to ``max_total`` whatever was given.
        status: int32 [1]; 0, or bits: 1 order, 2 depth above capacity, 4 node count above capacity or bad offsets, 8
            parent is no live node, 16 more nodes in all than ``max_total`` (:meth:`pack_`).
        max_batch: requests.
        max_nodes: most nodes of a request.
        max_total: rows of a packed tree; ``max_batch * max_nodes`` for a dense one.
        max_depth: largest number of strict ancestors of a node.
        device: device of the tensors.
        is_packed: whether ``offsets`` is in use.
        lead: shape of the rows, (max_batch, max_nodes) or packed (max_total,).
    """

    __slots__ = (
        "_validate", "ancestors", "depths", "device", "is_packed", "lead", "max_batch", "max_depth", "max_nodes",
        "max_total", "offsets", "parents", "status",
    )  # fmt: skip

    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def __init__(
        self,
        max_batch: int,
        max_nodes: int,
        *,
        max_depth: int | None = None,
        max_total: int | None = None,
        device: torch.device | str = "cpu",
        validate: bool | None = None,
    ) -> None:
        """Create an all-padding batch with the given capacities; packed when ``max_total`` is given.

        Args:
            max_batch: requests, 0 or more.
            max_nodes: 1 to 512.
            max_depth: largest number of strict ancestors; default ``max_nodes - 1``.
            max_total: rows of a packed tree.
            device: where the tensors live.
            validate: check topologies and raise. Default: only on the CPU (a check on a device costs a host sync).

        Raises:
            TypeError: a capacity is not an int.
            ValueError: a capacity is out of range.
        """
        self.max_batch = check_capacity("max_batch", max_batch, 0, 2**31 - 1)
        self.max_nodes = check_capacity("max_nodes", max_nodes, 1, MAX_NODES)
        depth = max_nodes - 1 if max_depth is None else max_depth
        self.max_depth = check_capacity("max_depth", depth, 0, max_nodes - 1)
        self.is_packed = max_total is not None
        total = max_batch * max_nodes if max_total is None else max_total
        self.max_total = check_capacity("max_total", total, 0, 2**31 - 1)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.device = self.status.device
        self._validate = checks_values(validate, self.device)
        rows: tuple[int, ...] = (total,) if self.is_packed else (max_batch, max_nodes)
        self.lead = rows
        self.parents = torch.full(rows, PADDING, dtype=torch.int32, device=device)
        self.depths = torch.full(rows, -1, dtype=torch.int32, device=device)
        self.ancestors = torch.zeros(*rows, words_of(max_nodes), dtype=torch.int32, device=device)
        self.offsets = torch.zeros(max_batch + 1, dtype=torch.int32, device=device) if self.is_packed else None

    @classmethod
    def from_parents(
        cls, parents: torch.Tensor, max_depth: int | None = None, validate: bool | None = None
    ) -> TreeBatch:
        """Build dense trees.

        Args:
            parents: int32 or int64 [B, N]; parent index below the node's own, -1 root, -2 padding.
            max_depth: largest number of strict ancestors; default N - 1. A tight bound gives faster kernels.
            validate: raise on an invalid tree; default on the CPU only.

        Raises:
            TypeError: ``parents`` is not an int32 or int64 tensor.
            ValueError: its shape is not [B, N] with 1 <= N <= 512, or the tree is invalid.
        """
        check_index_tensor("parents", parents, 2)
        batch, nodes = parents.shape
        check_capacity("parents: number of nodes", nodes, 1, MAX_NODES)
        return cls(batch, nodes, max_depth=max_depth, device=parents.device, validate=validate).update_(parents)

    @classmethod
    def from_packed(
        cls,
        parents: torch.Tensor,
        offsets: torch.Tensor,
        max_nodes: int,
        max_depth: int | None = None,
        validate: bool | None = None,
    ) -> TreeBatch:
        """Build packed trees.

        Args:
            parents: int32 or int64 [T], request-local: node i of request b is row ``offsets[b] + i``.
            offsets: int32 or int64 [B + 1], not decreasing, from 0 to at most T. Rows that no request owns are padding.
            max_nodes: most nodes of a request, 1 to 512.
            max_depth: as in :meth:`from_parents`.
            validate: as in :meth:`from_parents`.

        Raises:
            TypeError: wrong types.
            ValueError: wrong shapes or an invalid tree.
        """
        check_index_tensor("parents", parents, 1)
        check_index_tensor("offsets", offsets, 1)
        check_capacity("offsets: number of entries", offsets.shape[0], 1, 2**31 - 1)
        tree = cls(
            offsets.shape[0] - 1,
            max_nodes,
            max_depth=max_depth,
            max_total=parents.shape[0],
            device=parents.device,
            validate=validate,
        )
        return tree.update_(parents, offsets)

    @classmethod
    def from_sglang(
        cls, parents: torch.Tensor, live: torch.Tensor, max_depth: int | None = None, validate: bool | None = None
    ) -> TreeBatch:
        """Build dense trees from SGLang's parent table; see :meth:`sglang_parents`. No host sync on a device."""
        return cls.from_parents(cls.sglang_parents(parents, live), max_depth, validate)

    @staticmethod
    def sglang_parents(parents: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Translate SGLang's parent table: node 0 is the root whatever its entry says, and rows that are not live are
        stale.

        Args:
            parents: int32 or int64 [B, N]; entry i is the parent of node i, 0 for children of the root. Entry 0 is
                ignored.
            live: bool [B], or the int32 / int64 slots [B] where -1 marks a row that is not live.

        Returns:
            parents in Bole's form, for :meth:`from_parents` or :meth:`update_`.

        Raises:
            TypeError: wrong types.
            ValueError: wrong shapes.
        """
        return parents_from_table(parents, live)

    @classmethod
    def from_links(
        cls,
        next_token: torch.Tensor,
        next_sibling: torch.Tensor,
        live: torch.Tensor,
        max_depth: int | None = None,
        validate: bool | None = None,
    ) -> TreeBatch:
        """Build dense trees from child and sibling links; see :func:`~bole_runtime.tree.parents_from_links`."""
        return cls.from_parents(parents_from_links(next_token, next_sibling, live), max_depth, validate)

    @classmethod
    def chain(cls, batch: int, nodes: int, device: torch.device | str = "cpu") -> TreeBatch:
        """Build one chain of ``nodes`` nodes a request."""
        check_capacity("batch", batch, 0, 2**31 - 1)
        check_capacity("nodes", nodes, 1, MAX_NODES)
        parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=device)
        return cls.from_parents(parents.expand(batch, nodes))

    @property
    def batch(self) -> int:
        """Requests, padding rows included."""
        return self.max_batch

    @property
    def validates(self) -> bool:
        """Whether topologies are checked on the host."""
        return self._validate

    def update_(self, parents: torch.Tensor | None = None, offsets: torch.Tensor | None = None) -> TreeBatch:
        """Rebuild the tree in place, on its device. Without validation there is no host sync, and a CUDA graph can
        hold it.

        Args:
            parents: int32 or int64. Dense: [B, N] up to the capacities; the rest becomes padding. Packed:
                [max_total]. Default: rebuild from ``self.parents``, which the caller has changed.
            offsets: packed only, int32 or int64 [max_batch + 1]. Default: ``self.offsets``.

        Returns:
            This object.

        Raises:
            TypeError: wrong types.
            ValueError: wrong shapes or device; or, with validation, an invalid tree (this object is then unchanged).
        """
        source = self.parents if parents is None else check_index_tensor("parents", parents, self.parents.dim())
        if source.device != self.device:
            raise ValueError(f"parents: on {source.device}, but the tree is on {self.device}")
        given = tuple(source.shape)
        if self.is_packed:
            if given != (self.max_total,):
                raise ValueError(f"parents: expected shape ({self.max_total},), got {given}")
        elif given[0] > self.max_batch or given[1] > self.max_nodes:
            raise ValueError(f"parents: shape {given} is above the capacity ({self.max_batch}, {self.max_nodes})")
        limits = self._check_offsets(offsets)
        if backend_name(self.device) == "triton":
            if self._validate:
                plan(self, source, limits, check=True)
            from bole_runtime.tree.build_triton import build_into

            if self.offsets is not None and limits is not None and limits is not self.offsets:
                self.offsets.copy_(as_int32(limits))
            build_into(
                source, self.offsets, self.parents, self.ancestors, self.depths, self.status,
                self.max_batch, self.max_nodes, self.max_depth,
            )  # fmt: skip
            if self.offsets is not None:
                # Kernels trust them: those of an invalid tree must not lead out of the buffers.
                self.offsets.clamp_(0, self.max_total)
        else:
            store(self, plan(self, source, limits, check=self._validate), limits)
        return self

    def pack_(self, parents: torch.Tensor, counts: torch.Tensor | None = None) -> TreeBatch:
        """Rebuild a packed tree in place from dense rows: the requests follow one another without gaps.

        The same guarantees as :meth:`update_`. If the nodes of all requests are more than ``max_total``, the requests
        that do not fit whole, and all after the first such one, get no nodes and ``status`` gets bit 16.

        Args:
            parents: int32 or int64 [B, N], up to the capacities; e.g. of
                :func:`~bole_runtime.tree.parents_from_links`.
            counts: int32 or int64 [B], nodes of each request, taken from the front of its row. Default: up to and
                including its last node that is not padding.

        Returns:
            This object.

        Raises:
            TypeError: wrong types.
            ValueError: not a packed tree, wrong shapes or device; or, with validation, an invalid tree or too many
                nodes (this object is then unchanged).
        """
        from bole_runtime.tree.pack import pack

        return pack(self, parents, counts)

    def _check_offsets(self, offsets: torch.Tensor | None) -> torch.Tensor | None:
        if offsets is None:
            return self.offsets
        if not self.is_packed:
            raise ValueError("offsets: not allowed for a dense tree")
        check_index_tensor("offsets", offsets, 1)
        if offsets.device != self.device:
            raise ValueError(f"offsets: on {offsets.device}, but the tree is on {self.device}")
        if tuple(offsets.shape) != (self.max_batch + 1,):
            raise ValueError(f"offsets: expected shape ({self.max_batch + 1},), got {tuple(offsets.shape)}")
        return offsets

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat row of every node, int64 [max_batch, max_nodes], and whether the node is live, bool of that
        shape.

        Nodes that are not live have some valid row. Flat means [max_batch * max_nodes] for a dense tree.
        """
        return rows_of(self)

    def mask(self) -> torch.Tensor:
        """Return the inclusive ancestor mask as bool [max_batch, max_nodes, max_nodes]: row i marks i and its strict
        ancestors."""
        return mask_of(self)

    def path(self, request: int, node: int) -> list[int]:
        """Return the nodes from the root to ``node``, itself included. Reads the device: for tests and debugging.

        Raises:
            ValueError: ``node`` is not a live node of the request.
        """
        return path_of(self, request, node)

    def __repr__(self) -> str:
        kind = "packed" if self.is_packed else "dense"
        return (
            f"TreeBatch({kind}, max_batch={self.max_batch}, max_nodes={self.max_nodes}, max_total={self.max_total}, "
            f"max_depth={self.max_depth}, device={self.device})"
        )
