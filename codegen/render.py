"""Render the kernels of a configuration: readable, deterministic, one real file a kernel.

The text depends on the problem, the configuration and the templates alone, so that rendering again gives the
same bytes. Undefined names in a template are errors.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

import bole_templates
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, KernelPlan
from bole_runtime.kernels.text import PLACEHOLDER, kernel_hash, template_hash
from bole_runtime.kernels.variants import get_variant

_CONSTANT = re.compile(r"([A-Z_]+) = tl\.constexpr\(")


@dataclass(frozen=True)
class RenderedKernel:
    """One generated kernel.

    Attributes:
        name: name of the kernel function and of its file, without ``.py``.
        source: the whole file.
        text_hash: hash of the code without comments: what a table entry is checked against.
        plan: launch options and offline-compilation signature.
    """

    name: str
    source: str
    text_hash: str
    plan: KernelPlan


def template_dir() -> Path:
    """Return the folder the templates are installed in."""
    return Path(bole_templates.__file__).parent


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _tidy(text: str) -> str:
    """Drop what rendering leaves behind: trailing spaces, blank lines inside functions, constants nobody reads."""
    lines: list[str] = []
    in_string = False
    source = [line.rstrip() for line in text.splitlines()]
    for i, line in enumerate(source):
        if not line and not in_string:
            following = next((later for later in source[i + 1 :] if later), "")
            inside = following.startswith(" ") and not following.lstrip().startswith("# ")
            if inside or (lines[-2:] == ["", ""]) or (lines[-1:] == [""] and not following.startswith("@")):
                continue
        in_string ^= line.count('"""') % 2 == 1
        constant = _CONSTANT.match(line)
        if constant and len(re.findall(rf"\b{constant[1]}\b", text)) == 1:
            continue
        lines.append(line)
    return "\n".join(lines).strip("\n") + "\n"


@functools.lru_cache(maxsize=4096)
def render(problem: Specialisation, config: Config) -> tuple[RenderedKernel, ...]:
    """Render every kernel of a configuration, in launch order.

    Args:
        problem: what the kernels are specialised for.
        config: a valid configuration of one of the problem's variants.

    Returns:
        One :class:`RenderedKernel` a launch.
    """
    variant = get_variant(problem.op, config.variant)
    return tuple(_render_plan(problem, plan) for plan in variant.plans(problem, config))


def _render_plan(problem: Specialisation, plan: KernelPlan) -> RenderedKernel:
    context = dict(plan.context)
    constants = context.pop("constants")
    source = _tidy(
        _environment()
        .get_template(plan.template)
        .render(
            name=PLACEHOLDER,
            args=[a.name for a in plan.arguments],
            fixed=[a.name for a in plan.arguments if not a.specialised and not a.name.endswith("_ptr")],
            unaligned=[a.name for a in plan.arguments if not a.specialised and a.name.endswith("_ptr")],
            template=plan.template,
            template_hash=template_hash(),
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            docstring=_title(problem, plan),
            constants=constants,
            **{name: value for name, value, _ in constants},
            **context,
        )
    )
    digest = kernel_hash(source, PLACEHOLDER, plan.options)
    name = f"{plan.stem}_{digest[:8]}"
    return RenderedKernel(name, source.replace(PLACEHOLDER, name), digest, plan)


def _title(problem: Specialisation, plan: KernelPlan) -> str:
    return problem.describe(plan.template.split(".")[0].replace("_", " "))
