"""Tile parameters: declared once, read by the search, the pruner, the analytic default and the renderer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from bole_runtime.kernels.arguments import Argument
from bole_runtime.kernels.problem import Specialisation

Value = int | str | bool


@dataclass(frozen=True)
class Param:
    """One tile parameter.

    Attributes:
        name: identifier, as it appears in tables and in the header of a rendered kernel.
        choices: every value it may ever take. A value outside is refused before it reaches a template.
        doc: one line for people.
        ordered: whether the choices are ordered (powers of two), which a sampler can use.
        usual: its value in tables from before it was there; None for a parameter that they name.
    """

    name: str
    choices: tuple[Value, ...]
    doc: str
    ordered: bool = True
    usual: Value | None = None


@dataclass(frozen=True)
class Config:
    """A variant with a value for each of its parameters. Hashable, ordered by parameter declaration."""

    variant: str
    params: tuple[tuple[str, Value], ...]

    def __getitem__(self, name: str) -> Any:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(name)

    def as_dict(self) -> dict[str, Value]:
        """Return the parameters as a plain dict."""
        return dict(self.params)

    def __str__(self) -> str:
        return self.variant + "(" + ", ".join(f"{k}={v}" for k, v in self.params) + ")"


@dataclass(frozen=True)
class GpuLimits:
    """The few facts about a GPU that decide whether a configuration can exist there."""

    compute_capability: tuple[int, int]
    sms: int
    smem_per_block: int
    l2_bytes: int
    bandwidth_gbs: float


@dataclass(frozen=True)
class KernelPlan:
    """One generated kernel of a configuration: what to render and how to launch it.

    Attributes:
        template: file under ``templates/``.
        stem: readable name of the kernel file and function; a hash is appended by the renderer.
        context: constants handed to the template. Plain ints, strings and bools.
        num_warps: Triton launch option.
        num_stages: Triton launch option.
        arguments: of the kernel, in order.
        scratch: the scratch buffers that its variant allocates (the others are None in a launch).
        pdl: launched while the kernel before it still runs (programmatic dependent launch).
        registers: the most that a thread may take; 0 for as many as there are.
    """

    template: str
    stem: str
    context: Mapping[str, Any]
    num_warps: int
    num_stages: int
    arguments: tuple[Argument, ...]
    scratch: tuple[str, ...] = ()
    pdl: bool = False
    registers: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Triton launch options."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.pdl:
            options["launch_pdl"] = True
        if self.registers:
            options["maxnreg"] = self.registers
        return options


@dataclass(frozen=True)
class Variant:
    """A way to compute one operation: its parameters, when they are valid, its default and its kernels.

    Attributes:
        name: unique identifier, e.g. ``fused``.
        op: the operation, e.g. ``verify``.
        doc: one line for people.
        params: declared tile parameters, in a fixed order.
        applies: reason this variant cannot serve a problem, or None.
        check: reason a complete assignment is invalid for a problem on a GPU, or None. Called after ``applies``.
        default: the analytic default for a problem on a GPU.
        plans: kernels of a configuration, in launch order.
        grids: launch grid of each kernel for a batch and a number of value heads (of a convolution: channels).
        workspace: fp32 elements of the two scratch buffers, for the same.
        narrow: tests of single parameters that every configuration worth trying on a problem passes. They repeat what
            ``check`` refuses, so that whoever lists configurations need not try it on everything, and leave out what
            is valid but never better.
        starts: changes to the default that a search tries first.
        spills: bytes a thread that a kernel may keep in local memory and still be worth a measurement. A few come from
            the ABI; more are spills, which cost every program unless they lie in code that is seldom run.
    """

    name: str
    op: str
    doc: str
    params: tuple[Param, ...]
    # The problems of an operation are of one class, which its variants know.
    applies: Callable[[Any], str | None]
    check: Callable[[Any, Config, GpuLimits], str | None]
    default: Callable[[Any, GpuLimits], Config]
    plans: Callable[[Any, Config], tuple[KernelPlan, ...]]
    grids: Callable[[Any, Config, int, int], tuple[tuple[int, ...], ...]]
    workspace: Callable[[Any, Config, int, int], tuple[int, int]]
    narrow: Callable[[Any, GpuLimits], Mapping[str, Callable[[Any], bool]]] = lambda problem, gpu: {}
    starts: tuple[Mapping[str, Value], ...] = ()
    spills: int = 64

    def config(self, values: Mapping[str, Value]) -> Config:
        """Build a Config, checking names and values against the declaration.

        Raises:
            ValueError: a parameter is missing, unknown, or has a value outside its declared choices.
        """
        extra = set(values) - {p.name for p in self.params}
        if extra:
            raise ValueError(f"variant {self.name!r} has no parameter {sorted(extra)[0]!r}")
        items: list[tuple[str, Value]] = []
        for p in self.params:
            value = values.get(p.name, p.usual)
            if value is None:
                raise ValueError(f"variant {self.name!r} needs a value for parameter {p.name!r}")
            if not any(type(value) is type(c) and value == c for c in p.choices):
                raise ValueError(f"{self.name}.{p.name} = {value!r} is not one of {p.choices}")
            items.append((p.name, value))
        return Config(self.name, tuple(items))

    def reason(self, problem: Specialisation, config: Config, gpu: GpuLimits) -> str | None:
        """Return why ``config`` cannot serve ``problem`` on ``gpu``, or None when it can."""
        if problem.op != self.op:
            return f"variant {self.name!r} serves {self.op!r}, not {problem.op!r}"
        return self.applies(problem) or self.check(problem, config, gpu)

    def first(self, problem: Specialisation, gpu: GpuLimits) -> list[Config]:
        """Return what a search tries first: the default, and it with each of the changes in ``starts``, if valid."""
        default = self.default(problem, gpu)
        changed = [self.config({**default.as_dict(), **changes}) for changes in self.starts]
        return list(dict.fromkeys([default, *(c for c in changed if self.reason(problem, c, gpu) is None)]))

    def choices(self, problem: Specialisation, gpu: GpuLimits) -> list[tuple[Value, ...]]:
        """Return the values of each parameter that a search tries for a problem, of those a configuration may have."""
        kept = self.narrow(problem, gpu)
        return [tuple(v for v in p.choices if p.name not in kept or kept[p.name](v)) for p in self.params]

    def enumerate(self, problem: Specialisation, gpu: GpuLimits) -> Iterator[Config]:
        """Yield every valid configuration that a search tries, in declaration order."""
        if problem.op != self.op or self.applies(problem) is not None:
            return
        for values in product(*self.choices(problem, gpu)):
            config = Config(self.name, tuple(zip((p.name for p in self.params), values, strict=True)))
            if self.check(problem, config, gpu) is None:
                yield config
