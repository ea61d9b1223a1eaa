"""SGLang's Mamba2 tree kernel, called as its target verification calls it for EAGLE trees (topk > 1).

The state update of decoding, walked over the nodes: it loads the parent's state from a snapshot buffer, steps, writes
the output and a snapshot of every node's state. Arguments as SGLang 0.5.23 gives them: x ``[B, N, heads, P]``, B and C
``[B, N, groups, state]``, A, D, dt and its bias as one value a head, seen as many, no update of the pool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from bole_codegen.measure import VerifyInputs, Workload
from peers.sglang_loader import execute, find_file
from peers.snapshots import SnapshotPeer, Snapshots, private_folder

FILE = "sglang/kernels/ops/mamba/triton_ops/mamba_ssm.py"
ENTRY = "selective_state_update"


class PreparedMamba:
    """The kernel bound to the layers of one benchmark point."""

    def __init__(self, entry: Callable[..., None], inputs: VerifyInputs, chain: bool, buffers: int) -> None:
        """Allocate ``buffers`` snapshot buffers and an output a layer."""
        self._entry, self._inputs = entry, inputs
        self._parents = None if chain else inputs.parents.to(torch.int32)
        self._slots = inputs.slots.to(torch.int32)
        self.snapshots = Snapshots(inputs, buffers)
        self._outs = [torch.empty_like(layer.v) for layer in inputs.layers]
        self.workspace_bytes, self.launches = self.snapshots.nbytes, 1

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return the launch of layer ``index``."""
        layer, work = self._inputs.layers[index], self._inputs.workload
        heads, p, n = work.hv, work.dv, work.dk
        raw = layer.raw
        arguments = {
            "dt": raw["dt_raw"][..., None].expand(-1, -1, -1, p),
            "A": (-raw["A_log"].exp())[:, None, None].expand(heads, p, n),
            "B": layer.k,
            "C": layer.q,
            "D": raw["D"][:, None].expand(heads, p),
            "dt_bias": raw["dt_bias"][:, None].expand(heads, p),
            "dt_softplus": True,
            "state_batch_indices": self._slots,
            "out": self._outs[index],
            "disable_state_update": True,
            "intermediate_states_buffer": self.snapshots.of(index),
            "cache_steps": work.nodes,
            "retrieve_parent_token": self._parents,
            "intermediate_state_indices": self.snapshots.rows,
        }
        return lambda: self._entry(layer.state, layer.v, **arguments)

    def output(self, index: int) -> Tensor:
        """Return the latest output of layer ``index``, ``[B, N, HV, dv]`` in the dtype of v."""
        return self._outs[index]

    def poison(self) -> None:
        """Fill the snapshots with NaN."""
        self.snapshots.poison()


class SglangMamba(SnapshotPeer):
    """The peer named ``sglang`` for Mamba2."""

    def __init__(self, entry: Callable[..., None], version: str) -> None:
        """Wrap a loaded entry function; use :meth:`load`."""
        super().__init__("sglang", version)
        self._entry = entry

    @classmethod
    def load(cls, path: str | None) -> SglangMamba:
        """Load from a path.

        Raises:
            PeerUnavailable: with the reason.
        """
        folder, place = private_folder()
        file = find_file(path, FILE, place)
        label = f"{file.name} ({hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"
        peer = cls(execute(file, ENTRY, label), label)
        peer._folder = folder
        return peer

    def refuses(self, work: Workload) -> str | None:
        """Return why the kernel cannot serve a point, or None."""
        if work.family != "mamba2":
            return f"is a kernel of mamba2, not of {work.family}"
        return "has no pending chain" if work.pending else None

    def bind(self, inputs: VerifyInputs, chain: bool, buffers: int) -> PreparedMamba:
        """Bind to inputs; a chain carries no parents."""
        return PreparedMamba(self._entry, inputs, chain, buffers)
