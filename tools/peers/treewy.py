"""TreeWY (arXiv 2608.20961): one launch a layer that commits the round before and verifies this one.

A program a request and head reads its state, folds the path accepted in the round before into it from a stash (keys,
pseudo-values and decays, fp32), writes the state, solves this tree row by row and writes the stash anew. So its like
is a verify and a commit. Every request of a batch has the same tree: its masks have no batch dimension.

Here the accepted path is empty, which changes no byte that is read or written and leaves the states as they are: a
captured launch can be repeated and checked. Slot 0 is its padding slot, so the states are copied one slot up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bole_codegen.measure import VerifyInputs, Workload
from peers.base import PeerRefuses, PeerUnavailable
from peers.sglang_loader import execute

FILE = "tree_wy_triton.py"
INSIDE = "vllm/third_party/flash_linear_attention/ops"
TREE, CHAIN = "tree_wy_tree_commit_capture_triton", "tree_wy_chain_commit_capture_triton"
#: A program holds matrices of all nodes squared, padded to a power of two: 256 squared are beyond two warps.
MAX_NODES = 128
#: What scratch holds that a call must not use. No NaN: the commit multiplies all of the stash by weights, here zero.
GARBAGE = 1e3


def locate(path: str | None) -> Path:
    """Return TreeWY's file: itself, in a folder, or in a checkout of the vLLM branch.

    Raises:
        PeerUnavailable: no path, or no such file there.
    """
    if not path:
        raise PeerUnavailable(f"no --treewy PATH given ({FILE}, a folder with it, or a checkout)")
    given = Path(path).expanduser()
    for file in (given, given / FILE, given / INSIDE / FILE):
        if file.is_file():
            return file
    raise PeerUnavailable(f"--treewy {given} holds no {FILE}")


def ancestors(parents: list[int]) -> Tensor:
    """Return which nodes are on the path to each, itself included, as fp32 ``[N, N]``."""
    mask = torch.eye(len(parents))
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = torch.maximum(mask[node], mask[parent])
    return mask


class PreparedTreeWY:
    """The kernel bound to the layers of one benchmark point."""

    launches = 1

    def __init__(self, functions: dict[str, Callable[..., Tensor]], inputs: VerifyInputs, chain: bool, bf16: bool):
        """Copy the states and allocate a stash a layer."""
        work, device = inputs.workload, inputs.parents.device
        b, n = work.batch, work.nodes
        self._entry, self._inputs, self._chain, self._bf16 = (
            functions["chain" if chain else "tree"],
            inputs,
            chain,
            bf16,
        )
        self.slots = inputs.slots.long() + 1
        self.pools = [torch.cat([torch.zeros_like(layer.state[:1]), layer.state]) for layer in inputs.layers]
        rows = self.pools[0].shape[0]
        self._stashes = [
            (
                torch.zeros(rows, work.hv, n, work.dv, device=device),
                torch.zeros(rows, n, work.hv, work.dk, device=device),
                torch.zeros(rows, work.hv, n, device=device),
            )
            for _ in inputs.layers
        ]
        inclusive = ancestors(inputs.parents_host[0].tolist())
        self._masks = [(inclusive - torch.eye(n)).to(device), inclusive.to(device)]
        # The last row, of a node that is none, is the empty path.
        self._paths = torch.cat([inclusive, torch.zeros(1, n)]).to(device)
        #: The node of each request that was accepted in the round before: none.
        self.accepted = torch.full((b,), -1 if chain else n, dtype=torch.int64, device=device)
        self._outputs: dict[int, Tensor] = {}
        self.workspace_bytes = 4 * sum(t.numel() for t in self._stashes[0])

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return the launch of layer ``index``."""
        layer, work = self._inputs.layers[index], self._inputs.workload
        tokens = work.batch * work.nodes
        packed = [x.reshape(tokens, *x.shape[2:]) for x in (layer.q, layer.k, layer.v, layer.raw["a"], layer.raw["b"])]
        masks = [] if self._chain else self._masks
        paths = [] if self._chain else [self._paths]
        arguments = (
            *packed, layer.raw["A_log"], layer.raw["dt_bias"], *masks, *self._stashes[index], *paths, self.accepted,
            self.slots, self.pools[index], work.nodes, None,
        )  # fmt: skip

        def launch() -> None:
            self._outputs[index] = self._entry(*arguments, dot_bf16=self._bf16)

        return launch

    def output(self, index: int) -> Tensor:
        """Return the latest output of layer ``index``, ``[B, N, HV, dv]`` in the dtype of q."""
        return self._outputs[index]

    def poison(self) -> None:
        """Fill the stashes with numbers that show where an empty path takes any of them up."""
        for values, keys, decays in self._stashes:
            values.fill_(GARBAGE)
            keys.fill_(GARBAGE)
            # A positive decay is its mark for a stash that nobody may commit.
            decays.fill_(-1.0)


class TreeWY:
    """The peers ``treewy-bf16`` (operands in bf16, its default) and ``treewy-ieee`` (fp32).

    Keys, queries, the state, the readout's weights and pseudo-values in bf16 cost 2.4e-3, which is within ``fast``.
    """

    commits = True
    includes = "verify, and the commit of the round before; reads and writes the states"

    def __init__(self, functions: dict[str, Callable[..., Any]], version: str, bf16: bool) -> None:
        """Wrap loaded functions; use :meth:`load`."""
        self.name, self.version = f"treewy-{'bf16' if bf16 else 'ieee'}", version
        self.profile = "fast" if bf16 else "lossless"
        self._functions, self._bf16 = functions, bf16

    @classmethod
    def load(cls, path: str | None, bf16: bool) -> TreeWY:
        """Load from a path.

        Args:
            path: see :func:`locate`.
            bf16: whether operands of its products are rounded to bf16.

        Raises:
            PeerUnavailable: with the reason.
        """
        file = locate(path)
        label = f"{file.name} ({hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"
        tree = execute(file, TREE, label, {}, "treewy")
        if CHAIN not in tree.__globals__:
            raise PeerUnavailable(f"treewy {label} has no {CHAIN}")
        return cls({"tree": tree, "chain": tree.__globals__[CHAIN]}, label, bf16)

    def refuses(self, work: Workload) -> str | None:
        """Return why the kernel cannot serve a point, or None."""
        if work.family != "gdn":
            return f"is a kernel of gdn, not of {work.family}"
        if work.pending:
            return "has no pending chain"
        if work.nodes > MAX_NODES:
            return f"holds all nodes squared in a program; at most {MAX_NODES} here"
        return None if work.dv % 32 == 0 else "takes head dimensions that are multiples of 32"

    def memory_bytes(self, work: Workload) -> int:
        """Bytes of a layer's states and stash."""
        stash = 4 * work.batch * work.nodes * work.hv * (work.dv + work.dk + 1)
        return work.state_bytes + stash

    def prepare(self, inputs: VerifyInputs, shape: str, scratch_budget: int) -> PreparedTreeWY:
        """Bind to inputs.

        Raises:
            PeerRefuses: trees that differ, or gates that the kernel does not read.
            PeerUnavailable: the states and stashes of all layers do not fit.
        """
        if not inputs.layers[0].raw:
            raise PeerRefuses("reads raw gates, which this point has not")
        if not bool((inputs.parents == inputs.parents[:1]).all()):
            raise PeerRefuses(f"takes one tree for all requests, and {shape} draws one for each")
        need = len(inputs.layers) * self.memory_bytes(inputs.workload)
        if need > scratch_budget:
            raise PeerUnavailable(
                f"states and stashes need {need / 1e9:.1f} GB, {scratch_budget / 1e9:.1f} GB are free"
            )
        return PreparedTreeWY(self._functions, inputs, shape == "chain", self._bf16)
