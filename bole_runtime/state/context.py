"""What a pending chain needs of the calls it came from: per-head parameters, floats, whether keys are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from bole_runtime.factors import Factors
from bole_runtime.families import RecurrenceSpec


@dataclass(frozen=True, eq=False)
class CallContext:
    """Facts of a layer's calls that do not change from round to round.

    Attributes:
        l2norm: whether keys are l2-normalised.
        parameters: per-head tensors of the gate mode in which gates are kept; none where ready gates are.
        floats: of that mode.
        called: whether a call was read; before that, chains are empty.
    """

    l2norm: bool
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    floats: Mapping[str, float] = field(default_factory=dict)
    called: bool = False

    @classmethod
    def of_gates(
        cls, spec: RecurrenceSpec, mode: str, gates: Mapping[str, torch.Tensor | float], l2norm: bool | None
    ) -> CallContext:
        """Read the gates of a call that are kept in ``mode``; what does not fit is left for ``verify`` to refuse."""
        parameters, floats = {}, {}
        for i in spec.parameters(mode):
            given = gates.get(i.name)
            if isinstance(given, torch.Tensor):
                parameters[i.name] = given
        for i in spec.options(mode):
            number = gates.get(i.name, i.default)
            if isinstance(number, (int, float)):
                floats[i.name] = float(number)
        return cls(spec.qk_l2norm if l2norm is None else bool(l2norm), parameters, floats, called=True)

    @classmethod
    def of_factors(cls, factors: Factors) -> CallContext:
        """Read the factors that a call returned."""
        names = {i.name for i in factors.spec.parameters(factors.gate_mode)}
        floats = {}
        if factors.spec.options(factors.gate_mode):
            floats = {**factors.all_options}
        return cls(factors.qk_l2norm, {n: t for n, t in factors.gates.items() if n in names}, floats)

    def serves(self, spec: RecurrenceSpec, mode: str) -> bool:
        """Whether it holds what gates kept in ``mode`` need; not before a layer's first call, when chains are empty."""
        needed = {i.name for i in (*spec.parameters(mode), *spec.options(mode)) if i.name in spec.required[mode]}
        floats = {i.name for i in spec.options(mode)}
        return needed <= self.parameters.keys() | self.floats.keys() and floats <= self.floats.keys()

    def difference(self, other: CallContext) -> str:
        """Describe in which numbers two calls differ, so that tokens of one cannot be folded in as those of the other.

        Empty if in none, or if there was no call. Parameters are not compared: their values are on the device.
        """
        if not (self.called and other.called):
            return ""
        mine, theirs = ({"qk_l2norm": c.l2norm, **c.floats} for c in (self, other))
        names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        return ", ".join(f"{n} = {mine.get(n)} instead of {theirs.get(n)}" for n in names)

    def same(self, other: CallContext) -> bool:
        """Whether launches that were prepared for one serve the other: the same memory, the same numbers."""
        mine, theirs = self.parameters, other.parameters
        return (
            self.l2norm == other.l2norm
            and mine.keys() == theirs.keys()
            and all(t.data_ptr() == theirs[name].data_ptr() for name, t in mine.items())
            and self.floats == other.floats
        )

    def apply(self, factors: Factors) -> Factors:
        """Return factors with these facts in them."""
        floats = dict(self.floats)
        scale = floats.pop("beta_scale", 1.0)
        return factors.replace(
            gates={**factors.gates, **self.parameters}, beta_scale=scale, options=floats, qk_l2norm=self.l2norm
        )
