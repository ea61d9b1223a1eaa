"""SGLang's serial tree kernel, called as its target verification calls it for EAGLE trees (topk > 1).

One program a value tile walks the nodes in order. It loads the parent's state from a snapshot buffer, steps, writes
the output, and writes a snapshot of every node's state for the commit to copy from. Arguments as SGLang 0.5.23 gives
them: one packed sequence ``[1, B * N, heads, dim]`` with ``cu_seqlens``, raw gates, int32 parents ``[B, N]``,
snapshots ``[rows, N, HV, dv, dk]`` in the state's dtype, no update of the pool. A chain carries no parents (topk = 1).
One kernel serves Gated DeltaNet and Kimi Delta Attention, whose gate has a value a key channel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bole_codegen.measure import VerifyInputs, Workload
from peers.sglang_loader import SglangSource, load_entry, locate
from peers.snapshots import SnapshotPeer, Snapshots, private_folder

Entry = Callable[..., Tensor]
#: Family to the raw gates that the kernel calls ``a`` and ``b``.
GATES = {"gdn": ("a", "b"), "kda": ("f", "b")}
#: The packed form's compile time grows with all tokens of the batch: 2 s at 4096, 14 s at 16384, 80 s at 32768.
MAX_PACKED_TOKENS = 1 << 15


class PreparedSerial:
    """The kernel bound to the layers of one benchmark point."""

    def __init__(self, entry: Entry, inputs: VerifyInputs, chain: bool, dense: bool, buffers: int) -> None:
        """Allocate ``buffers`` snapshot buffers; layers take turns with them."""
        work = inputs.workload
        self._entry, self._inputs, self._dense = entry, inputs, dense
        device = inputs.parents.device
        b, n = work.batch, work.nodes
        self._parents = None if chain else inputs.parents.to(torch.int32)
        self._bounds = None if dense else torch.arange(0, b * n + 1, n, dtype=torch.int32, device=device)
        self._slots = inputs.slots.to(torch.int32)
        self.snapshots = Snapshots(inputs, buffers)
        self._outputs: dict[int, Tensor] = {}
        self.workspace_bytes, self.launches = self.snapshots.nbytes, 1

    def _pack(self, x: Tensor) -> Tensor:
        return x if self._dense else x.reshape(1, -1, *x.shape[2:])

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return the launch of layer ``index``."""
        layer, work = self._inputs.layers[index], self._inputs.workload
        gate, write = (layer.raw[name] for name in GATES[work.family])
        tokens = work.batch * work.nodes
        arguments = {
            "A_log": layer.raw["A_log"],
            "dt_bias": layer.raw["dt_bias"],
            "q": self._pack(layer.q),
            "k": self._pack(layer.k),
            "v": self._pack(layer.v),
            # Gates come as [tokens, HV] or [tokens, HV * dk] whatever the layout: only their token stride is read.
            "a": gate.reshape(tokens, -1),
            "b": write.reshape(tokens, -1),
            "initial_state_source": layer.state,
            "initial_state_indices": self._slots,
            "cu_seqlens": self._bounds,
            "use_qk_l2norm_in_kernel": True,
            "softplus_beta": 1.0,
            "softplus_threshold": 20.0,
            "is_kda": work.family == "kda",
            "disable_state_update": True,
            "intermediate_states_buffer": self.snapshots.of(index),
            "intermediate_state_indices": self.snapshots.rows,
            "cache_steps": work.nodes,
            "retrieve_parent_token": self._parents,
        }

        def launch() -> None:
            self._outputs[index] = self._entry(**arguments)

        return launch

    def output(self, index: int) -> Tensor:
        """Return the latest output of layer ``index``, ``[B, N, HV, dv]`` in the dtype of q."""
        return self._outputs[index].view(self._inputs.layers[index].v.shape)

    def snapshot(self, index: int) -> Tensor:
        """Return the snapshots of layer ``index``, ``[B, N, HV, dv, dk]``, until another layer takes the buffer."""
        return self.snapshots.of(index)[: self._inputs.workload.batch]

    def poison(self) -> None:
        """Fill the snapshots with NaN."""
        self.snapshots.poison()


class SglangSerial(SnapshotPeer):
    """The peer named ``sglang``; ``sglang-dense`` is the same kernel on ``[B, N]`` without ``cu_seqlens``.

    The packed form, which is SGLang's, keeps a row of parents as long as all tokens of the batch in registers; the
    dense form shows what the kernel does without that.
    """

    def __init__(self, entry: Entry, source: SglangSource, dense: bool) -> None:
        """Wrap a loaded entry function; use :meth:`load`."""
        super().__init__("sglang-dense" if dense else "sglang", source.label)
        self._entry, self._dense = entry, dense

    @classmethod
    def load(cls, path: str | None, dense: bool) -> SglangSerial:
        """Load from a path.

        Raises:
            PeerUnavailable: with the reason.
        """
        folder, place = private_folder()
        source = locate(path, place)
        peer = cls(load_entry(source), source, dense)
        peer._folder = folder
        return peer

    def refuses(self, work: Workload) -> str | None:
        """Return why the kernel cannot serve a point, or None."""
        if work.pending:
            return "has no pending chain"
        if work.family not in GATES:
            return f"is a kernel of {' and '.join(GATES)}, not of {work.family}"
        tokens = work.batch * work.nodes
        if not self._dense and tokens > MAX_PACKED_TOKENS:
            return f"would hold {tokens} parents in the registers of one warp; compiling that takes minutes"
        return None

    def bind(self, inputs: VerifyInputs, chain: bool, buffers: int) -> PreparedSerial:
        """Bind to inputs; a chain carries no parents."""
        return PreparedSerial(self._entry, inputs, chain, self._dense, buffers)
