"""Get the kernel functions of a configuration: shipped source first, else rendered here.

Kernels come from the installed package or from the templates, never from a table's folder. Rendered files go to a
private cache, written atomically, and are used only after their text was compared with what was rendered.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import stat
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bole_runtime.families import get_family
from bole_runtime.kernels.arguments import usual_gate_dtypes
from bole_runtime.kernels.problem import Problem, Specialisation
from bole_runtime.kernels.space import Config, KernelPlan
from bole_runtime.kernels.text import kernel_hash, template_hash
from bole_runtime.kernels.variants import get_variant


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that can be launched.

    Attributes:
        name: of the function.
        function: the ``triton.jit`` function; ``function[grid](*args, num_warps=..., num_stages=...)``.
        plan: launch options and arguments.
    """

    name: str
    function: Any
    plan: KernelPlan

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Enqueue the kernel on the current stream."""
        self.function[grid](*args, **self.plan.options)


def kernel_cache_dir() -> Path:
    """Return the folder for rendered kernels, private to the user; ``BOLE_CACHE_DIR`` moves it.

    Raises:
        RuntimeError: it cannot be made, or another user could change the code in it.
    """
    root = os.environ.get("BOLE_CACHE_DIR")
    folder = Path(root) if root else Path.home() / ".cache" / "bole"
    folder = folder / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError as error:
        raise _unusable(folder, error) from error
    if info.st_uid not in (0, os.getuid()) or info.st_mode & stat.S_IWOTH:
        raise _unusable(folder, "another user can write to it, and it holds code that is run")
    return folder


def _unusable(folder: Path, why: object) -> RuntimeError:
    return RuntimeError(
        f"rendered kernels cannot be kept in {folder}: {why}; set BOLE_CACHE_DIR to a folder of your own"
    )


@functools.lru_cache(maxsize=1)
def _shipped() -> dict[str, Path]:
    spec = importlib.util.find_spec("bole_tuned")
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(next(iter(spec.submodule_search_locations)))
    return {path.stem: path for path in sorted(root.glob("*/kernels/*.py"))}


def _import(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"bole_kernels.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_bytes() == text.encode():
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".py")
    with os.fdopen(handle, "wb") as file:
        file.write(text.encode())
    try:
        os.replace(temporary, path)
    except OSError:  # As where a folder has the name.
        os.unlink(temporary)
        raise


def import_kernel(name: str, source: str) -> Any:
    """Return the kernel function of a rendered source, through a file in the private cache (Triton reads files)."""
    path = kernel_cache_dir() / f"{name}.py"
    try:
        _write(path, source)
    except OSError as error:
        raise _unusable(path.parent, error) from error
    return _import(name, path)


class KernelWarning(UserWarning):
    """A kernel that the package ships cannot be used as it is, and is rendered anew."""


def _text(path: Path) -> str | None:
    """Return the text of a shipped kernel, None where it cannot be read, which is warned of."""
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        why = "is a folder" if path.is_dir() else "is no file" if os.path.lexists(path) else "is missing"
    except UnicodeDecodeError:
        why = "is no text"
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
    _warn(path, why)
    return None


@functools.lru_cache(maxsize=1024)
def _warn(path: Path, why: str) -> None:
    """Warn of a damaged kernel, once a process."""
    text = f"bole: the shipped kernel {path} {why}; it is rendered anew (installing Bole again repairs it)"
    warnings.warn(text, KernelWarning, stacklevel=2)


def _is_of(path: Path, plan: KernelPlan) -> bool:
    """Whether a shipped kernel was rendered for a plan, as its header tells: a table may name any of them.

    A file that was edited or is damaged is no such kernel: its name ends in the hash of its code.
    """
    text = _text(path)
    if text is None:
        return False
    context, options = plan.context, f"num_warps={plan.num_warps} num_stages={plan.num_stages}"
    whole = kernel_hash(text, path.stem, plan.options).startswith(path.stem.rpartition("_")[2])
    header = set(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    wanted = (f"spec: {context['spec_line']}", f"config: {context['config_line']}", f"launch: {options}")
    if any(f"# {line}" not in header for line in wanted):
        # That of another configuration has a header of its own.
        if not header:
            _warn(path, "is damaged or was edited: it has no header")
        return False
    if not whole:
        _warn(path, "is damaged or was edited: its name ends in another hash than its code has")
    return whole


def _templates_changed(path: Path) -> bool:
    """Whether the templates are others than those a shipped kernel was rendered from: it may be outdated."""
    return f"# template hash: {template_hash()}\n" not in (_text(path) or "")[:2000] and template_hash() != ""


@dataclass(frozen=True)
class _Found:
    """A kernel before it is imported.

    Attributes:
        name: of the function.
        plan: launch options and arguments.
        path: its file, where the package ships it.
        source: what was rendered, elsewhere.
    """

    name: str
    plan: KernelPlan
    path: Path | None = None
    source: str = ""

    def load(self) -> LoadedKernel:
        function = import_kernel(self.name, self.source) if self.path is None else _import(self.name, self.path)
        return LoadedKernel(self.name, function, self.plan)


@functools.lru_cache(maxsize=4096)
def _load(problem: Specialisation, config: Config, names: tuple[str, ...]) -> tuple[LoadedKernel, ...]:
    return tuple(found.load() for found in _find(problem, config, names))


def _find(problem: Specialisation, config: Config, names: tuple[str, ...]) -> tuple[_Found, ...]:
    plans = get_variant(problem.op, config.variant).plans(problem, config)
    shipped = _shipped()
    # Names of kernels tell everything but the normalisation and the types of the gates, which tables take as usual.
    usual = not isinstance(problem, Problem) or (
        problem.qk_l2norm == get_family(problem.family).qk_l2norm
        and problem.gate_dtypes in ((), usual_gate_dtypes(problem))
    )
    fits = (
        usual
        and len(names) == len(plans)
        and all(
            name in shipped and name.startswith(plan.stem + "_") and _is_of(shipped[name], plan)
            for name, plan in zip(names, plans, strict=True)
        )
    )
    if fits and not any(_templates_changed(shipped[name]) for name in names):
        return _take(shipped, names, plans)
    try:
        from bole_codegen.render import render
    except ImportError as error:
        if fits:  # What was shipped is all there is.
            return _take(shipped, names, plans)
        raise RuntimeError(
            f"no shipped kernel serves {problem.key()} with {config}, and rendering one needs bole_codegen and Jinja2: "
            f"install the full package ({error})"
        ) from error
    made = render(problem, config)
    if fits and [r.name for r in made] == list(names):
        return _take(shipped, names, plans)
    return tuple(_Found(r.name, r.plan, source=r.source) for r in made)


def _take(shipped: dict[str, Path], names: tuple[str, ...], plans: tuple[KernelPlan, ...]) -> tuple[_Found, ...]:
    return tuple(_Found(n, plan, shipped[n]) for n, plan in zip(names, plans, strict=True))


def load(problem: Specialisation, config: Config, names: tuple[str, ...] = ()) -> tuple[LoadedKernel, ...]:
    """Return the kernels of a configuration, in launch order.

    Args:
        problem: what the kernels are specialised for.
        config: a valid configuration.
        names: kernels a table entry names; used when the package ships them.

    Raises:
        RuntimeError: nothing shipped fits and bole_codegen is not installed.
    """
    # One load serves every bucket that does not shape the text.
    return _load(problem.for_text(), config, names)


def names_of(problem: Specialisation, config: Config, names: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the kernels that :func:`load` would return, without loading any.

    The name of a kernel ends in the first digits of the hash of its text, see
    :func:`~bole_runtime.kernels.text.kernel_hash`.

    Args:
        problem: what the kernels are specialised for.
        config: a valid configuration.
        names: kernels a table entry names.

    Raises:
        RuntimeError: as :func:`load`.
    """
    return tuple(found.name for found in _find(problem.for_text(), config, names))
