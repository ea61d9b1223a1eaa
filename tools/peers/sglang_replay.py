"""SGLang's ReplaySSM for chains of drafts of Gated DeltaNet: a ring of records instead of states.

What SGLang 0.5.23 runs under ``--enable-linear-replayssm-spec``. Its verify reads the state and the ring's pending
tokens, and appends a record a node (update, normalised key, decay; updates and keys as a high and a low part of the
inputs' dtype). Its commit moves cursors, and folds the ring into the states of all layers where it is nearly full. The
ring here is as long as its rule asks for: pending tokens and two windows, 16 at least.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bole_codegen.measure import LayerInputs, VerifyInputs, Workload
from peers.base import PeerRefuses, PeerUnavailable
from peers.sglang_loader import execute, find_file, packages, stand_ins
from peers.snapshots import private_folder

RING_FILE = "sglang/kernels/ops/attention/linear/gdn_replayssm_spec_decode.py"
VERIFY, ADVANCE, CIRCULAR = "gdn_replayssm_spec_decode", "commit_gdn_replayssm_spec", "commit_gdn_replayssm_circular"
#: Its kernel unrolls loops over the window; SGLang's drafts are shorter.
MAX_NODES = 16
#: What a ring holds where nothing was written. No NaN: its commit multiplies such rows by zero.
GARBAGE = 1e3
Functions = dict[str, Callable[..., Any]]


def ring_length(pending: int, nodes: int) -> int:
    """Return the shortest ring in which that many tokens can be pending: it is folded once two windows do not fit."""
    return 1 << (max(16, pending + 2 * nodes) - 1).bit_length()


class Prepared(ABC):
    """What kernels with a commit of all layers have: their states in one tensor, and an output a layer."""

    launches = 1
    state_bound: float

    def __init__(self, functions: Functions, inputs: VerifyInputs) -> None:
        """Copy the states."""
        self._functions, self._inputs = functions, inputs
        self.pools = torch.stack([layer.state for layer in inputs.layers])
        self._slots = inputs.slots.to(torch.int32)
        self._outputs: dict[int, Tensor] = {}

    def _ring(self, rows: int, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        layers, like = len(self._inputs.layers), self._inputs.layers[0].v
        return torch.zeros(layers, rows, *sizes, dtype=dtype or like.dtype, device=like.device)

    def _bounds(self, tokens: int) -> Tensor:
        batch = self._inputs.workload.batch
        return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=self._slots.device)

    def output(self, index: int) -> Tensor:
        """Return the latest output of layer ``index``, ``[B, N, HV, dv]`` in the dtype of q."""
        return self._outputs[index].view(self._inputs.layers[index].v.shape)

    def committed(self, index: int) -> Tensor:
        """Return the states of layer ``index`` as they are now, ``[B, HV, dv, dk]``."""
        return self.pools[index][self._inputs.slots.long()]

    @abstractmethod
    def make_layer(self, index: int) -> Callable[[], object]:
        """Return the launch of layer ``index``."""

    @abstractmethod
    def make_commit(self, counts: list[int]) -> Callable[[], object]:
        """Return what folds pending tokens and ``counts`` nodes into the states; it may run many times."""

    @abstractmethod
    def poison(self) -> None:
        """Fill what a call must write before it is read."""


class PreparedRing(Prepared):
    """The kernels bound to the layers of one benchmark point."""

    # Updates come from products in tf32 over a history of which only the high parts are read.
    state_bound = 2e-3

    def __init__(self, functions: Functions, inputs: VerifyInputs) -> None:
        """Allocate rings a layer, and put the pending tokens into them by its own kernel."""
        super().__init__(functions, inputs)
        work, device = inputs.workload, self._slots.device
        b, self._pending = work.batch, work.pending
        self.length = length = ring_length(work.pending, work.nodes)
        wide, narrow = (b, work.hv, length, work.dv), (b, work.hk, length, work.dk)
        self._rings = [self._ring(*wide), self._ring(*narrow), self._ring(*wide[:3], dtype=torch.float32)]
        # Low parts: where records are fp32 already, SGLang has none.
        low = inputs.layers[0].v.dtype != torch.float32
        self._low: list[Tensor | None] = [self._ring(*wide), self._ring(*narrow)] if low else [None, None]
        self._rows = torch.arange(b, device=device)
        self._written = torch.zeros(b, dtype=torch.int32, device=device)
        # Rings that begin anywhere.
        self._base = (5 * torch.arange(b, dtype=torch.int32, device=device) + length - 3) % length
        self._full = torch.zeros(b, dtype=torch.int8, device=device)
        every = [*self._rings, *(t for t in self._low if t is not None)]
        self.workspace_bytes = sum(t.numel() * t.element_size() for t in every) // len(inputs.layers)
        self._append(getattr(inputs, "pending", ()))

    def _append(self, pending: tuple[LayerInputs, ...]) -> None:
        """Put tokens into the rings, a window at a time, as rounds that accept all of them would."""
        step = self._inputs.workload.nodes
        for begin in range(0, self._pending, step):
            window = slice(begin, min(begin + step, self._pending))
            for index, tokens in enumerate(pending):
                self._verify(index, tokens, window)()
            self._written += window.stop - window.start
        # Those of other windows are no layer's output.
        self._outputs.clear()

    def _verify(self, index: int, layer: LayerInputs, window: slice) -> Callable[[], object]:
        def packed(x: Tensor) -> Tensor:
            return x[:, window].reshape(-1, *x.shape[2:])

        q, v = packed(layer.q), packed(layer.v)
        low = [None if ring is None else ring[index] for ring in self._low]
        arguments = {
            "q": q,
            "k": packed(layer.k),
            "v": v,
            "a": packed(layer.raw["a"]),
            "b": packed(layer.raw["b"]),
            "A_log": layer.raw["A_log"],
            "dt_bias": layer.raw["dt_bias"],
            "checkpoint_state": self.pools[index],
            "d_cache": self._rings[0][index],
            "k_cache": self._rings[1][index],
            "g_cache": self._rings[2][index],
            "rawv_cache": low[0],
            "rawk_cache": low[1],
            "beta_cache": None,
            "query_start_loc": self._bounds(window.stop - window.start),
            "ssm_state_indices": self._slots,
            "replay_indices": self._rows,
            "write_pos": self._written,
            "cache_base": self._base,
            "is_flush": self._full,
            "max_cache_len": self.length,
            "max_spec_len": self._inputs.workload.nodes,
            "scale": layer.q.shape[-1] ** -0.5,
            "use_qk_l2norm_in_kernel": True,
            "null_block_id": -1,
            "launch_mode": "verify",
        }
        shape = v.shape

        def launch() -> None:
            self._outputs[index] = self._functions["verify"](**arguments, out=q.new_empty(shape))

        return launch

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return the launch of layer ``index``."""
        return self._verify(index, self._inputs.layers[index], slice(0, self._inputs.workload.nodes))

    def _fill(self, begin: int, value: float) -> None:
        """Fill the rings from a position on, counted from where each begins."""
        position = (torch.arange(self.length, device=self._base.device) - self._base[:, None]) % self.length
        outside = (position >= begin)[None, :, None, :]
        for ring in (*self._rings, *self._low):
            if ring is not None:
                ring.masked_fill_(outside if ring.ndim == 4 else outside[..., None], value)

    def poison(self) -> None:
        """Fill the rings behind the pending tokens."""
        self._fill(self._pending, GARBAGE)

    def make_commit(self, counts: list[int]) -> Callable[[], object]:
        """Return the commit of a round in which every ring is folded; call it after the last verify.

        Its cursors then end where they began but for the place in the ring, whose other rows are zeros.
        """
        nodes = self._inputs.workload.nodes
        self._fill(self._pending + nodes, 0.0)
        self._written.zero_()
        device = self._written.device
        taken = torch.tensor([self._pending + c for c in counts], dtype=torch.int32, device=device)
        accepted = torch.tensor(counts, dtype=torch.int32, device=device)

        def commit() -> None:
            self._functions["advance"](
                self._written, self._base, self._full, taken, self._rows, self.length, nodes, fold_every_commit=True,
                null_block_id=-1,
            )  # fmt: skip
            self._functions["circular"](
                checkpoint_state=self.pools, d_cache=self._rings[0], k_cache=self._rings[1], g_cache=self._rings[2],
                d_residual_cache=self._low[0], k_residual_cache=self._low[1], state_batch_indices=self._slots,
                replay_indices=self._rows, write_pos=self._written, cache_base=self._base, is_flush=self._full,
                accept_lens=accepted, null_block_id=-1,
            )  # fmt: skip

        return commit


class ReplaySSM:
    """The peer ``replayssm-ring``."""

    name = "replayssm-ring"
    profile = "fast"
    includes = "verify over state and ring, appends to the ring"
    commits = False

    def __init__(self, functions: Functions, version: str) -> None:
        """Wrap loaded functions; use :meth:`load`."""
        self.version, self._functions = version, functions
        #: Triton may read the sources again while it compiles.
        self._folder: object = None

    @classmethod
    def load(cls, path: str | None) -> ReplaySSM:
        """Load from the path of SGLang.

        Args:
            path: see :func:`peers.sglang_loader.find_file`.

        Raises:
            PeerUnavailable: with the reason.
        """
        folder, place = private_folder()
        file = find_file(path, RING_FILE, place)
        label = f"{file.name} ({hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"
        verify = execute(file, VERIFY, label, _modules())
        missing = [name for name in (ADVANCE, CIRCULAR) if name not in verify.__globals__]
        if missing:
            raise PeerUnavailable(f"sglang {label} has no {missing[0]}")
        commit = {"advance": verify.__globals__[ADVANCE], "circular": verify.__globals__[CIRCULAR]}
        peer = cls({"verify": verify, **commit}, label)
        peer._folder = folder
        return peer

    def refuses(self, work: Workload) -> str | None:
        """Return why the kernels cannot serve a point, or None."""
        if work.family != "gdn":
            return f"is a kernel of gdn, not of {work.family}"
        if work.nodes > MAX_NODES:
            return f"unrolls its window; at most {MAX_NODES} nodes here"
        if work.dk != work.dv or work.dk < 32 or work.dk & (work.dk - 1):
            return "takes square heads, of a power of two from 32 on"
        return None

    def memory_bytes(self, work: Workload) -> int:
        """Bytes of a layer's states and of its ring."""
        rows = work.batch * ring_length(work.pending, work.nodes)
        return work.state_bytes + rows * 4 * (work.hv * (work.dv + 1) + work.hk * work.dk)

    def prepare(self, inputs: VerifyInputs, shape: str, scratch_budget: int) -> Prepared:
        """Bind to inputs.

        Raises:
            PeerRefuses: trees that are no chains, or gates that the kernels do not read.
            PeerUnavailable: the states of all layers do not fit a second time.
        """
        if not inputs.layers[0].raw:
            raise PeerRefuses("reads raw gates, which this point has not")
        if shape != "chain":
            raise PeerRefuses("verifies chains only")
        need = len(inputs.layers) * self.memory_bytes(inputs.workload)
        if need > scratch_budget:
            raise PeerUnavailable(f"states and rings need {need / 1e9:.1f} GB, {scratch_budget / 1e9:.1f} GB are free")
        return self.bind(inputs)

    def bind(self, inputs: VerifyInputs) -> Prepared:
        """Bind to inputs that are served."""
        return PreparedRing(self._functions, inputs)


def _modules() -> dict[str, ModuleType]:
    """Stand-ins for what the file of the ring imports of SGLang."""
    modules = stand_ins()
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    vars(packages(modules, "sglang.kernels.ops.attention.fla.utils"))["is_tf32_supported"] = supported
    return modules
