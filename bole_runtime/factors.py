"""State factors: what verification leaves behind so that a commit can rebuild the accepted state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from bole_runtime.families import get_family
from bole_runtime.families.spec import DATA_DTYPES, RecurrenceSpec

if TYPE_CHECKING:
    from bole_runtime.tree import TreeBatch


class _NoOptions(Mapping[str, float]):
    """No entries, ever; a copy, also of another process, is the same object."""

    def __getitem__(self, name: str) -> float:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __reduce__(self) -> str:
        return "NO_OPTIONS"


NO_OPTIONS: Mapping[str, float] = _NoOptions()


@dataclass(slots=True, eq=False)
class PendingChain:
    """Accepted tokens that are not in the state yet: a chain of ancestors above every root, one ring a slot.

    Token t of slot s is row ``(start[s] + t) % capacity``, for t below ``length[s]``.

    Attributes:
        k: [slots, capacity, HK, dk], raw keys, the dtype of the call's k.
        v: [slots, capacity, HV, dv].
        gates: what captured factors hold of the family. Where ready gates are one value a head (``g`` and ``beta``):
            those, [slots, capacity, HV], fp32 (fp64 for fp64 keys), whatever the gate mode of the call, all of one
            layout. Otherwise the node gates of the call's mode, [slots, capacity, HV, ...]; per-head parameters and
            floats come from the call.
        length: int32 [slots], 0 to capacity.
        start: int32 [slots], 0 to capacity - 1.
    """

    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    length: torch.Tensor
    start: torch.Tensor

    @property
    def capacity(self) -> int:
        """Rows of a ring."""
        return self.k.shape[1]


@dataclass(slots=True, eq=False)
class Factors:
    """Raw inputs of a verification, kept for the commit.

    The tensors alias the caller's unless buffers were given to ``verify(factors=...)``; aliased tensors must stay
    alive and unchanged until the commit.

    Attributes:
        spec: the family.
        gate_mode: mode of ``gates``. Captured factors are ``ready`` whatever the call had, where the family's ready
            gates are one value a head; otherwise they have the call's mode.
        k: [B, N, HK, dk] or packed [T, HK, dk].
        v: [B, N, HV, dv] or packed [T, HV, dv].
        gates: per node and head, and the per-head parameters of the mode.
        beta_scale: factor of sigmoid(b) in raw mode.
        qk_l2norm: whether k is l2-normalised.
        tree: the topology that was verified.
        pending: the pending chain that was verified on top of, or None.
        options: floats of the mode other than ``beta_scale``.
    """

    spec: RecurrenceSpec
    gate_mode: str
    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    beta_scale: float
    qk_l2norm: bool
    tree: TreeBatch
    pending: PendingChain | None = None
    options: Mapping[str, float] = field(default_factory=lambda: NO_OPTIONS)

    @classmethod
    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def allocate(
        cls,
        tree: TreeBatch,
        *,
        key_heads: int,
        value_heads: int,
        dk: int,
        dv: int,
        dtype: torch.dtype = torch.bfloat16,
        recurrence: str | RecurrenceSpec = "gdn",
        device: torch.device | str | None = None,
        gate_mode: str = "ready",
        gate_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    ) -> Factors:
        """Allocate buffers for ``verify(factors=...)``, of the tree's capacity. Zero-filled.

        k and v keep the input dtype. Gates are stored ready, in float32 (float64 for float64 inputs), where the family
        has one value a head; otherwise as the call gives them.

        Args:
            tree: decides dense [max_batch, max_nodes] or packed [max_total] rows.
            key_heads: HK.
            value_heads: HV, a multiple of HK.
            dk: key head dimension.
            dv: value head dimension.
            dtype: dtype of the k and v that will be captured.
            recurrence: family name or spec.
            device: default, the tree's.
            gate_mode: of the calls, for families whose gates are stored as given; no other looks at it.
            gate_dtype: dtype of gates stored as given, at least as wide as the inputs', or one for some of the names;
                default float32.

        Raises:
            TypeError: no tree, a size that is no int, no family, or a dtype that k and v cannot have.
            ValueError: a size below 1, HV is not a multiple of HK, or the family, the gate mode or a gate's name is
                unknown.
        """
        from bole_runtime.tree import TreeBatch
        from bole_runtime.tree.check import check_capacity

        if not isinstance(tree, TreeBatch):
            raise TypeError(f"tree: expected a TreeBatch, got {type(tree).__name__}")
        if dtype not in DATA_DTYPES:
            raise TypeError(f"dtype: {dtype!r} is not allowed; allowed: {', '.join(map(str, DATA_DTYPES))}")
        spec = recurrence if isinstance(recurrence, RecurrenceSpec) else get_family(recurrence)
        for name, size in (("key_heads", key_heads), ("value_heads", value_heads), ("dk", dk), ("dv", dv)):
            check_capacity(name, size, 1, 2**31 - 1)
        if value_heads % key_heads:
            raise ValueError(f"value_heads: {value_heads} is not a positive multiple of key_heads = {key_heads}")
        lead = tree.lead
        device = tree.device if device is None else torch.device(device)
        if gate_mode not in spec.modes:
            allowed = ", ".join(spec.modes)
            raise ValueError(f"gate_mode: {gate_mode!r} is not allowed for {spec.name!r}; allowed: {allowed}")
        mode = spec.kept_mode(gate_mode)
        kept = spec.node_gates(mode)
        usual = torch.float64 if dtype is torch.float64 else torch.float32
        dtypes = dict.fromkeys((i.name for i in kept), usual)
        if not spec.keeps_ready and gate_dtype is not None:
            given = gate_dtype if isinstance(gate_dtype, Mapping) else dict.fromkeys(dtypes, gate_dtype)
            if not given.keys() <= dtypes.keys():
                raise ValueError(f"gate_dtype: expected some of {sorted(dtypes)}, got {sorted(given)}")
            dtypes.update(given)
        heads, dims = (key_heads, value_heads), (dk, dv)
        return cls(
            spec=spec,
            gate_mode=mode,
            k=torch.zeros(*lead, key_heads, dk, dtype=dtype, device=device),
            v=torch.zeros(*lead, value_heads, dv, dtype=dtype, device=device),
            gates={
                i.name: torch.zeros(*lead, *i.sizes(heads, dims), dtype=dtypes[i.name], device=device) for i in kept
            },
            beta_scale=1.0,
            qk_l2norm=spec.qk_l2norm,
            tree=tree,
        )

    @property
    def all_options(self) -> Mapping[str, float]:
        """Every float of the mode, ``beta_scale`` included."""
        return {"beta_scale": self.beta_scale, **self.options}

    @property
    def nbytes_per_node(self) -> int:
        """Bytes kept for one node: k, v and the per-node gates; per-head parameters do not count."""
        rows = [self.k, self.v, *(self.gates[i.name] for i in self.spec.node_gates(self.gate_mode))]
        skip = 1 if self.tree.is_packed else 2
        return sum(t.element_size() * t.shape[skip:].numel() for t in rows)

    def replace(self, **changes: object) -> Factors:
        """Return a copy with some fields changed; tensors are shared."""
        return replace(self, **changes)  # type: ignore[arg-type]


def parameters_of(spec: RecurrenceSpec, mode: str, gates: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the per-head parameters of a gate mode among the gates of a call."""
    return {i.name: gates[i.name] for i in spec.parameters(mode) if i.name in gates}


def pending_gates(
    spec: RecurrenceSpec, pending: PendingChain, gates: Mapping[str, torch.Tensor], mode: str
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the gate mode of a pending chain, and its gates with the per-head parameters of the call."""
    kept = spec.kept_mode(mode)
    return kept, {**pending.gates, **parameters_of(spec, kept, gates)}


def ready_gates(
    spec: RecurrenceSpec,
    gates: Mapping[str, torch.Tensor],
    mode: str,
    beta_scale: float,
    options: Mapping[str, float] = NO_OPTIONS,
) -> dict[str, torch.Tensor]:
    """Return the ready gates in float64, per-head ones included: bf16 or fp32 gates in, nothing rounded on the way."""
    ready = spec.gates("ready")
    if mode == "ready":
        return {i.name: gates[i.name].double() for i in ready if i.name in gates}
    shared = {i.name: gates[i.name].double() for i in ready if i.mode == "both" and i.name in gates}
    return {**shared, **spec.make_ready[mode](gates, {"beta_scale": beta_scale, **options})}


def kept_gates(
    spec: RecurrenceSpec,
    gates: Mapping[str, torch.Tensor],
    mode: str,
    beta_scale: float,
    options: Mapping[str, float] = NO_OPTIONS,
) -> Mapping[str, torch.Tensor]:
    """Return the gates of a call as capture buffers and pending chains hold them: ready in float64, or as given."""
    return ready_gates(spec, gates, mode, beta_scale, options) if spec.keeps_ready else gates
