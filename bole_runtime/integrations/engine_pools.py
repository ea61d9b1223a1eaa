"""State pools of an engine, and the checks that rounds over them make before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_runtime import validate_values as values
from bole_runtime.backend_choice import backend_name
from bole_runtime.conv.checks import check_pool as check_window
from bole_runtime.state.copy_slots import check_pool
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import checks_values
from bole_runtime.validate import check_state, not_a
from bole_runtime.validate_memory import check_apart


@dataclass(frozen=True)
class EnginePools:
    """State pools of an engine, all recurrent layers of a rank.

    Attributes:
        states: [layers, slots, HV, dv, dk], dk contiguous.
        conv: [layers, slots, C, W - 1] of raw inputs, oldest first, any strides; several such pools where a layer's
            channels are kept apart (q, k and v), in the order of the channels; or None.
    """

    states: torch.Tensor
    conv: torch.Tensor | tuple[torch.Tensor, ...] | None = None

    @property
    def windows(self) -> tuple[torch.Tensor, ...]:
        """The pools of a layer's convolutions; empty without one."""
        if self.conv is None:
            return ()
        return (self.conv,) if isinstance(self.conv, torch.Tensor) else self.conv

    def check(self, layer: LayerGeometry) -> None:
        """Check shapes, dtypes and memory against the geometry that all layers share.

        Raises:
            TypeError: a wrong type or dtype.
            ValueError: a wrong shape, device or stride, or memory that slots, layers or pools share.
        """
        states, width = self.states, max(layer.conv_width - 1, 0)
        check_pool("pools.states", states)
        if states.dim() != 5 or not states.shape[0]:
            raise ValueError(f"pools.states: expected [layers, slots, HV, dv, dk], got shape {tuple(states.shape)}")
        layers, slots = states.shape[:2]
        device, backend = states.device, backend_name(states.device)
        check_state("pools.states[0]", states[0], device, *layer.state_shape, backend)
        if not isinstance(self.windows, tuple):
            not_a("pools.conv", self.conv, "a torch.Tensor, a tuple of them, or None")
        for n, pool in enumerate(self.windows):
            name = self._name(n)
            check_pool(name, pool)
            if pool.dim() != 4 or pool.shape[:2] != (layers, slots):
                raise ValueError(f"{name}: expected ({layers}, {slots}, C, W - 1), got shape {tuple(pool.shape)}")
        channels = sum(pool.shape[2] for pool in self.windows)
        if channels != layer.channels:
            raise ValueError(f"pools: {channels} channels of convolutions, where the layer has {layer.channels}")
        for n, pool in enumerate(self.windows):
            name = self._name(n)
            if pool.shape[3] != width:
                raise ValueError(f"{name}: windows of {pool.shape[3]} inputs, expected W - 1 = {width}")
            check_window(f"{name}[0]", pool[0], device, pool.shape[2], layer.conv_width, backend)
        if slots:
            named = [("pools.states", states), *((self._name(n), pool) for n, pool in enumerate(self.windows))]
            # By layer: windows and states of a page lie between one another, which only shows with one period a tensor.
            check_apart([(f"{name}[{n}]", pool[n]) for name, pool in named for n in range(layers)], ())

    def _name(self, part: int) -> str:
        return "pools.conv" if isinstance(self.conv, torch.Tensor) else f"pools.conv[{part}]"


def check_commit(tree: TreeBatch, slots: torch.Tensor, accepted: torch.Tensor, pool_slots: int) -> None:
    """Check the values of a commit where they can be read without a host sync: on a CPU.

    Args:
        tree: of the round.
        slots: [rows].
        accepted: [rows].
        pool_slots: slots of the pools.

    Raises:
        ValueError: a faulty tree, a slot or node out of range, a padding node, or a slot that is written twice.
    """
    if checks_values(None, tree.device):
        values.check_status(tree)
        values.check_slots(slots, pool_slots)
        values.check_accepted(accepted, slots, tree)


def check_targets(slots: torch.Tensor, targets: torch.Tensor, wanted: torch.Tensor, pool_slots: int) -> None:
    """Check the slots that copies are written to, on a CPU.

    Args:
        slots: [n], of the requests.
        targets: [n].
        wanted: bool [n], rows that are copied.
        pool_slots: slots of the pools.

    Raises:
        ValueError: a target is out of range, that of two rows, or the slot of a request.
    """
    if not checks_values(None, slots.device):
        return
    sources, seen = set(slots.tolist()), dict[int, int]()
    for row, (target, copied) in enumerate(zip(targets.tolist(), wanted.tolist(), strict=True)):
        if not copied:
            continue
        if not 0 <= target < pool_slots:
            raise ValueError(f"targets: targets[{row}] = {target} is outside 0 to {pool_slots - 1}")
        if target in sources:
            raise ValueError(f"targets: targets[{row}] = {target} is the slot of a request of the batch")
        if target in seen:
            raise ValueError(f"targets: rows {seen[target]} and {row} both copy to slot {target}")
        seen[target] = row
