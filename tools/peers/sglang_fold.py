"""SGLang's ReplaySSM that folds every round: the serial kernel verifies a chain and keeps its window's raw inputs.

One launch then replays the accepted ones into the states of all layers, in the serial kernel's own arithmetic. SGLang
0.5.23 has these kernels for Gated DeltaNet, and takes the ring for it (:mod:`peers.sglang_replay`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from bole_codegen.measure import VerifyInputs, Workload
from peers.sglang_loader import execute, find_file, load_entry, locate
from peers.sglang_replay import Functions, Prepared, ReplaySSM
from peers.snapshots import private_folder

FOLD_FILE = "sglang/kernels/ops/attention/linear/gdn_replayssm_spec_fold.py"
FOLD = "commit_gdn_replayssm_fold_all_layers"


class PreparedFold(Prepared):
    """The kernels bound to the layers of one benchmark point."""

    # The recurrence in fp32.
    state_bound = 5e-6

    def __init__(self, functions: Functions, inputs: VerifyInputs) -> None:
        """Allocate a window a slot and layer."""
        super().__init__(functions, inputs)
        work, rows = inputs.workload, self.pools.shape[1]
        self._windows = {
            "replayssm_rawv": self._ring(rows, work.hv, work.nodes, work.dv),
            "replayssm_rawk": self._ring(rows, work.hk, work.nodes, work.dk),
            "replayssm_g": self._ring(rows, work.hv, work.nodes, dtype=torch.float32),
            "replayssm_beta": self._ring(rows, work.hv, work.nodes, dtype=torch.float32),
        }
        size = sum(t.numel() * t.element_size() for t in self._windows.values())
        self.workspace_bytes = size // len(inputs.layers)

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return the launch of layer ``index``."""
        layer, nodes = self._inputs.layers[index], self._inputs.workload.nodes
        arguments = {
            "A_log": layer.raw["A_log"],
            "dt_bias": layer.raw["dt_bias"],
            **{name: getattr(layer, name).flatten(0, 1)[None] for name in ("q", "k", "v")},
            **{name: layer.raw[name].flatten(0, 1) for name in ("a", "b")},
            "initial_state_source": self.pools[index],
            "initial_state_indices": self._slots,
            "cu_seqlens": self._bounds(nodes),
            "use_qk_l2norm_in_kernel": True,
            "softplus_beta": 1.0,
            "softplus_threshold": 20.0,
            "is_kda": False,
            "disable_state_update": True,
            "cache_ring": True,
            **{name: window[index] for name, window in self._windows.items()},
        }

        def launch() -> None:
            self._outputs[index] = self._functions["verify"](**arguments)

        return launch

    def poison(self) -> None:
        """Fill the windows with NaN."""
        for window in self._windows.values():
            window.fill_(torch.nan)

    def make_commit(self, counts: list[int]) -> Callable[[], object]:
        """Return the fold of the accepted nodes of all layers."""
        accepted = torch.tensor(counts, dtype=torch.int32, device=self._slots.device)
        work = self._inputs.workload
        return lambda: self._functions["fold"](
            self.pools, *self._windows.values(), self._slots, accepted, work.nodes, work.hk
        )


class ReplayFold(ReplaySSM):
    """The peer ``replayssm-fold``."""

    name = "replayssm-fold"
    profile = "lossless"
    includes = "serial verify, keeps the window's inputs"

    @classmethod
    def load(cls, path: str | None) -> ReplayFold:
        """Load from the path of SGLang.

        Args:
            path: see :func:`peers.sglang_loader.find_file`.

        Raises:
            PeerUnavailable: with the reason.
        """
        folder, place = private_folder()
        file = find_file(path, FOLD_FILE, place)
        label = f"{file.name} ({hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"
        peer = cls({"fold": execute(file, FOLD, label), "verify": load_entry(locate(path, place))}, label)
        peer._folder = folder
        return peer

    def refuses(self, work: Workload) -> str | None:
        """Return why the kernels cannot serve a point, or None."""
        return "has no pending chain" if work.pending else super().refuses(work)

    def memory_bytes(self, work: Workload) -> int:
        """Bytes of a layer's states and of its window."""
        return work.state_bytes + 4 * work.batch * work.nodes * (work.hv * (work.dv + 2) + work.hk * work.dk)

    def bind(self, inputs: VerifyInputs) -> Prepared:
        """Bind to inputs that are served."""
        return PreparedFold(self._functions, inputs)
