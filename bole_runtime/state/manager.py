"""StateManager: what an engine holds of a model's recurrent layers, from a request's first token to its last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.state.buffers import LayerScratch, RoundBuffers
from bole_runtime.state.config import state_config
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.state.kernels import KernelChoice
from bole_runtime.state.memory import MemoryPlan, memory_of, plan_memory
from bole_runtime.state.operations import flush_slots
from bole_runtime.state.request import RequestState, check_pools
from bole_runtime.state.round import Round
from bole_runtime.state.scratch import scratch_of
from bole_runtime.state.slots import SlotList
from bole_runtime.state.snapshot import Snapshot, export_slot, import_slot, restore_slot, take_snapshot
from bole_runtime.tree import TreeBatch
from bole_runtime.validate import check_index

States = list[torch.Tensor]
ConvStates = list[torch.Tensor | None]


class StateManager:
    """Recurrent and convolution states of all layers, factors of all nodes, and when accepted tokens enter the states.

    Three lifetimes: ``request`` (pools, pending chains), ``buffers`` (factors, overwritten every round) and ``scratch``
    (one layer's call). Policies, all of which give the same states up to rounding:

    - ``eager``: after sampling, one launch for all layers of a geometry writes the accepted states.
    - ``fused``: accepted tokens wait in a chain and are written by the next round, before it verifies each layer.
    - ``deferred``: accepted tokens stay in a chain above the roots, which verification reads, until the chain would
      grow beyond ``flush_at``; then chain and path are written together.

    Slots are given out by a free list on the host. Nothing else reads device data on the host.

    Args:
        layers: geometry of every recurrent layer, in the order of the model (of this rank).
        pools: recurrent pools of the caller, one a layer, [slots, HV, dv, dk], any slot stride. Default: made here, the
            layers of a slot side by side.
        conv_pools: convolution pools of the caller, [slots, C, W - 1] or None for layers without one.
        batch_invariant: pin the kernels of the capacities given here, so that a request gets the same bits alone and in
            any batch, whatever the capacities of a round's tree. Those must have a ``max_nodes`` of the same bucket (up
            to 16, 32, 64, 128, 256, 512, and where ``deferred`` chains have up to 8 tokens, to 8), which is checked. On
            Triton and the reference backend.
        device: where everything lives; default, the current CUDA device, or the CPU without one.
        **sizes: see :func:`~bole_runtime.state.config.state_config`: slots, max_batch, max_nodes, max_total, max_depth,
            policy, pending, flush_at, dtype, state_dtype, conv_dtype, precision.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a size, name, shape or device is wrong.

    Example:
        >>> layer = LayerGeometry(key_heads=2, value_heads=4, dk=16, dv=16)
        >>> manager = StateManager([layer] * 3, slots=4, max_batch=2, max_nodes=8, dtype=torch.float32)
        >>> slot = manager.allocate()
        >>> print(manager.memory)
    """

    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        *,
        pools: Sequence[torch.Tensor] | None = None,
        conv_pools: Sequence[torch.Tensor | None] | None = None,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        **sizes: Any,
    ) -> None:
        self.config = config = state_config(layers, **sizes)
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # An index, so that tensors made here and elsewhere compare equal.
        self.device = torch.empty(0, device=where).device
        check_pools(config, self.device, backend_name(self.device), pools, conv_pools)
        self.request = RequestState(config, self.device, pools, conv_pools)
        self.buffers = RoundBuffers(config, self.device)
        self.scratch = LayerScratch(self.device, scratch_of(config, self.device, batch_invariant))
        self.current: Round | None = None
        self._slots = SlotList(config.slots)
        self.kernels = KernelChoice(config, self.device, batch_invariant)

    @staticmethod
    def bytes(layers: Sequence[LayerGeometry], **sizes: Any) -> MemoryPlan:
        """Return the memory that a manager with these arguments takes; see :func:`~bole_runtime.plan_memory`."""
        return plan_memory(layers, **sizes)

    @property
    def memory(self) -> MemoryPlan:
        """The memory of this manager: what ``plan_memory`` says, for the GPU that it is on."""
        return memory_of(self.config, self.scratch.nbytes)

    # Slots

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated."""
        return self._slots.free

    @property
    def used_slots(self) -> frozenset[int]:
        """Slots in use."""
        return self._slots.used

    def allocate(self) -> int:
        """Return a slot for a new request, with zero states.

        Raises:
            RuntimeError: none is free.
        """
        self._check_idle()
        slot = self._slots.take()
        self.request.reset(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            ValueError: it is not in use.
        """
        self._check_idle()
        self._slots.give(slot)

    def fork(self, slot: int) -> int:
        """Return a new slot with the content of another, its pending chain included.

        Raises:
            RuntimeError: none is free.
            ValueError: ``slot`` is not in use.
        """
        self._check_idle()
        self._slots.check(slot)
        new = self._slots.take()
        self.request.copy(new, slot)
        return new

    def copy(self, target: int, source: int) -> None:
        """Overwrite a slot in use with the content of another, its pending chain included.

        Raises:
            ValueError: one of them is not in use.
        """
        self._check_idle()
        self._slots.check(target, "target")
        self._slots.check(source, "source")
        if target != source:
            self.request.copy(target, source)

    def snapshot(self, slot: int, *, device: torch.device | str | None = None, materialise: bool = True) -> Snapshot:
        """Copy a slot out of the pools, for prefix caching.

        Args:
            slot: in use.
            device: where the copy lives; default, here.
            materialise: fold the pending chain into the slot's state first, so that the copy is states alone. False
                keeps the slot's bits, and copies ring and chain as they stand.

        Raises:
            ValueError: the slot is not in use, or no device that holds anything.
        """
        self._check_idle()
        self._slots.check(slot)
        if materialise:
            self.materialise([slot])
        try:
            where = self.device if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device: {error}") from error
        if where.type == "meta" != self.device.type:
            raise ValueError("device: the meta device holds nothing, so nothing could be restored from there")
        return take_snapshot(self.request, self.config, slot, where, not materialise)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Overwrite a slot in use with a snapshot, of this manager or of one with the same layers and dtypes.

        Raises:
            TypeError: not a Snapshot.
            ValueError: the slot is not in use, or the snapshot is of other layers, dtypes or chains.
        """
        self._check_idle()
        self._slots.check(slot)
        restore_slot(self.request, self.config, slot, snapshot)

    @overload
    def export_states(self, slot: int, layout: str = ..., *, conv: Literal[False] = ...) -> list[torch.Tensor]: ...
    @overload
    def export_states(self, slot: int, layout: str = ..., *, conv: Literal[True]) -> tuple[States, ConvStates]: ...
    def export_states(self, slot: int, layout: str = "dk_dv", *, conv: bool = False) -> Any:
        """Return copies of a slot's recurrent states, one [HV, dk, dv] a layer, pending tokens folded in.

        Args:
            slot: in use.
            layout: ``dk_dv`` (flash-linear-attention, transformers) or ``dv_dk``.
            conv: return a pair, the convolution states second: one [C, W - 1] a layer, oldest input first, None for
                layers without one. It is what :meth:`import_states` takes.
        """
        self._check_idle()
        self._slots.check(slot)
        self.materialise([slot])
        states, conv_states = export_slot(self.request, slot, layout)
        return (states, conv_states) if conv else states

    def import_states(
        self,
        slot: int,
        states: Sequence[torch.Tensor],
        conv_states: Sequence[torch.Tensor | None] | None = None,
        layout: str = "dk_dv",
    ) -> None:
        """Write the states of every layer of a slot, such as those of a prefill; its pending chain is dropped.

        Args:
            slot: in use.
            states: one [HV, dk, dv] a layer (or [HV, dv, dk], see ``layout``).
            conv_states: one [C, W - 1] a layer, None for layers without one. Default: left as they are.
            layout: ``dk_dv`` or ``dv_dk``.

        Raises:
            TypeError: wrong types.
            ValueError: the slot is not in use, or a wrong number or shape. Nothing has been written.
        """
        self._check_idle()
        self._slots.check(slot)
        import_slot(self.request, slot, states, conv_states, layout)

    def materialise(self, slots: Sequence[int] | None = None) -> None:
        """Fold the pending chains of some slots into their states, exactly as a commit would; one launch a geometry.

        Args:
            slots: in use; default, every slot in use.

        Raises:
            TypeError: no sequence of slots.
            ValueError: a slot is not in use.
        """
        self._check_idle()
        if isinstance(slots, int):
            raise TypeError(f"slots: expected a sequence of slots, got {slots}; write [{slots}]")
        which = sorted(self.used_slots if slots is None else {self._slots.check(s, "slots") for s in slots})
        if not self.request.chains or not which:
            return
        flush_slots(self.request, self.config, self.kernels, torch.tensor(which, dtype=torch.int32, device=self.device))

    # Rounds

    def round(self, tree: TreeBatch, slots: torch.Tensor) -> Round:
        """Return the calls of a round over a tree and its slots; make it once and use it every round.

        Args:
            tree: its capacities must be within those of the manager.
            slots: int32 or int64 [tree.max_batch] on the device; -1 marks a padding row.

        Raises:
            TypeError: wrong types.
            ValueError: a wrong shape or device, or a tree that is too large, or (``batch_invariant``) of another bucket
                of ``max_nodes``.
        """
        if not isinstance(tree, TreeBatch):
            raise TypeError(f"tree: expected a TreeBatch, got {type(tree).__name__}")
        if tree.device != self.device:
            raise ValueError(f"tree: on {tree.device}, but the manager is on {self.device}")
        for name in ("max_batch", "max_nodes", "max_total", "max_depth"):
            if getattr(tree, name) > getattr(self.config, name):
                raise ValueError(
                    f"tree: {name} = {getattr(tree, name)} is above the manager's {getattr(self.config, name)}"
                )
        self.kernels.check(tree)
        index = check_index("slots", slots, self.device, tree.max_batch)
        if index is not slots:
            raise ValueError("slots: must be contiguous, because it is read again in every round")
        return Round(self, tree, slots)

    def geometry(self, layer: int) -> LayerGeometry:
        """Return the geometry of a layer."""
        return self.config.layers[self.index(layer)]

    def index(self, layer: int) -> int:
        """Return the number of a layer.

        Raises:
            TypeError: not an int.
            ValueError: there is no such layer.
        """
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise TypeError(f"layer: expected an int, got {type(layer).__name__}")
        if not 0 <= layer < len(self.config.layers):
            raise ValueError(f"layer: {layer} is not allowed; allowed: 0 to {len(self.config.layers) - 1}")
        return layer

    def _check_idle(self) -> None:
        if self.current is not None:
            raise RuntimeError("a round was begun and neither committed nor abandoned; slots change between rounds")
