"""Pinned kernel configurations: a variant, some of its parameters, and the rest from its own default."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

import bole_runtime
from bole_runtime import Config, Factors, get_family
from bole_runtime.backends.triton_backend.commit import commit_problem
from bole_runtime.backends.triton_backend.select import _interpretable, limits_of
from bole_runtime.backends.triton_backend.verify import verify_problem
from bole_runtime.calls import CommitLayer
from bole_runtime.kernels import GpuLimits, Problem
from bole_runtime.kernels.variants import get_variant
from bole_runtime.kernels.variants.common import solves, tile_rows
from bole_testing.cases.base import Setup

#: Stands for the analytic default or a table: nothing is pinned.
DISPATCH = ""


@dataclass(frozen=True)
class Pin:
    """A configuration for any problem.

    Attributes:
        variant: of the verification, or :data:`DISPATCH`.
        changes: parameters that differ from the variant's default.
        strict: fail where the configuration cannot serve a problem; otherwise the variant's default serves it, and
            where the variant cannot, what dispatch chooses.
        commit: ``variant`` of the commit (``path`` if missing) and its parameters that differ from its default.
    """

    variant: str = DISPATCH
    changes: tuple[tuple[str, Any], ...] = ()
    strict: bool = False
    commit: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join((self.variant or "dispatch", *(f"{k}={v}" for k, v in self.changes + self.commit)))

    def config(self, problem: Problem, limits: GpuLimits) -> Config | None:
        """Return the configuration for a problem; None for what dispatch chooses."""
        name, changes = self.variant, dict(self.changes)
        if problem.op == "commit":
            changes = dict(self.commit)
            name = changes.pop("variant", "path" if changes else DISPATCH)
        if name == DISPATCH:
            return None
        variant = get_variant(problem.op, name)
        reason = variant.applies(problem)
        if reason is None:
            plain = variant.default(problem, limits)
            if os.environ.get("TRITON_INTERPRET") == "1":
                plain = _interpretable(problem, plain)
            rows = tile_rows(problem) if problem.op == "verify" else 0
            if name == "two_stage" and changes.get("row_block", rows) < rows:
                # The default is for all rows in one block.
                changes = {"solve": solves(problem.precision)[0], "mix_store": "fp32", "gather": "apart", **changes}
            if changes.get("programs", 0) or "bk" in changes:
                # A walk over tiles is ahead by itself, and so is a loop over key dims. The default may be neither.
                changes = {"prefetch": False, **changes}
            if changes.get("solve") in ("fp32", "fp16"):
                # For either profile: operands of fp32's range, or fp16 terms.
                normalised = changes["solve"] == "fp16"
                changes["solve"] = solves(problem.precision, normalised)[-1]
            for values in (changes, {}):
                config = variant.config({**plain.as_dict(), **values})
                reason = variant.reason(problem, config, limits)
                if reason is None:
                    return config
                if self.strict:
                    break
        assert not self.strict, f"{self} cannot serve {problem.key()}: {reason}"
        return None


def pin(variant: str = DISPATCH, *, strict: bool = True, commit: dict[str, Any] | None = None, **changes: Any) -> Pin:
    """Write a :class:`Pin` in one line."""
    return Pin(variant, tuple(changes.items()), strict, tuple((commit or {}).items()))


def device_limits(device: torch.device) -> GpuLimits:
    """Return the limits a configuration is checked against; on a CPU those of the interpreter."""
    return limits_of(-1 if device.type == "cpu" else torch.cuda.current_device())[1]


def problem_of_verify(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, gates: dict[str, Any], precision: str, **arguments: Any
) -> Problem:
    """Return the problem of a call of ``verify`` with these arguments."""
    l2norm, spec = arguments.get("qk_l2norm"), arguments.get("recurrence", "gdn")
    spec = get_family(spec) if isinstance(spec, str) else spec
    return verify_problem(
        SimpleNamespace(
            q=q, k=k, v=v, state=arguments["state"], slots=arguments["slots"], tree=arguments["tree"],
            pending=arguments.get("pending"), spec=spec, precision=precision,
            gate_mode=spec.mode_of(gates), qk_l2norm=spec.qk_l2norm if l2norm is None else l2norm,
        )
    )  # fmt: skip


def problems_of_commit(
    pools: list[torch.Tensor], slots: torch.Tensor, parts: list[Factors], precision: str
) -> list[Problem]:
    """Return the problem of every layer of a commit."""
    call = SimpleNamespace(spec=parts[0].spec, tree=parts[0].tree, slots=slots, precision=precision)
    return [commit_problem(call, CommitLayer(pool, part)) for pool, part in zip(pools, parts, strict=True)]


def pinned_verify(
    pinned: Pin, precision: str, limits: GpuLimits, out_dtype: torch.dtype | None = torch.float32
) -> Callable[..., Any]:
    """Return ``verify`` with a configuration pinned, and a precision and an output type for callers that give none."""

    def verify(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        arguments.setdefault("precision", precision)
        if arguments.get("out") is None:
            # One output type, so that fewer kernels are compiled: Triton compiles anew for each.
            arguments.setdefault("out_dtype", out_dtype)
        if arguments.get("variant") is None and v.numel():
            arguments["variant"] = pinned.config(problem_of_verify(q, k, v, **arguments), limits)
        return bole_runtime.verify(q, k, v, **arguments)

    return verify


def pinned_commit(pinned: Pin, precision: str, limits: GpuLimits) -> Callable[..., None]:
    """Return ``commit`` with a configuration pinned: layers that take the same one in one call."""

    def commit(pool: Any, slots: torch.Tensor, factors: Any, accepted: torch.Tensor, **arguments: Any) -> None:
        arguments.setdefault("precision", precision)
        if pinned.commit and slots.shape[0]:
            pools, parts = ([pool], [factors]) if isinstance(pool, torch.Tensor) else (list(pool), list(factors))
            problems = problems_of_commit(pools, slots, parts, arguments["precision"])
            configs = [pinned.config(problem, limits) for problem in problems]
            if len(set(configs)) > 1:
                for config in dict.fromkeys(configs):
                    mine = [i for i, c in enumerate(configs) if c == config]
                    own = {**arguments, "variant": config}
                    bole_runtime.commit([pools[i] for i in mine], slots, [parts[i] for i in mine], accepted, **own)
                return
            arguments["variant"] = configs[0] if configs else None
        bole_runtime.commit(pool, slots, factors, accepted, **arguments)

    return commit


def pinned_setup(
    pinned: Pin,
    device: torch.device | str,
    in_dtype: torch.dtype,
    state_dtype: torch.dtype,
    precision: str,
    limits: GpuLimits | None = None,
) -> Setup:
    """Return a setup whose calls take a pinned configuration."""
    where = torch.device(device)
    limits = limits or device_limits(where)
    return Setup(
        pinned_verify(pinned, precision, limits),
        pinned_commit(pinned, precision, limits),
        where,
        in_dtype,
        state_dtype,
        precision,
    )
