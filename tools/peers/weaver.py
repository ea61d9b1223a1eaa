"""Weaver (arXiv 2607.06763): the tree verification of Gated DeltaNet on a branch of SGLang, four launches a layer.

A launch each for the decays along paths, the Gram matrices with inverses of diagonal blocks, the blocked solve, and
the outputs; A, the masked Q K and U go through memory in fp32. Its verify is called as its own benchmark calls it:
raw gates, l2 norms inside, the structure of the trees built before, nothing kept for its commit. Its serving backend
also copies k, v and gates to a stash in further launches, which are left out here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bole_codegen.measure import VerifyInputs, Workload, poison_
from peers.base import PeerRefuses, PeerUnavailable
from peers.sglang_loader import execute, packages

PACKAGE = "sglang.srt.layers.attention.fla"
FILES = ("gdn_tree_fused.py", "gdn_tree_triton.py")
ENTRY = "tree_gdn_triton_verify"
#: Rows of a block of its solve: workspaces are padded to it.
BLOCK = 32
PROFILES = {"tf32": "fast", "tf32x3": "lossless"}


def locate(path: str | None) -> Path:
    """Return the folder that holds Weaver's files: itself, or a checkout of the branch.

    Raises:
        PeerUnavailable: no path, or not both files there.
    """
    if not path:
        raise PeerUnavailable(f"no --weaver PATH given (a folder with {' and '.join(FILES)}, or a checkout)")
    given = Path(path).expanduser()
    for folder in (given, given / "python" / PACKAGE.replace(".", "/"), given / PACKAGE.replace(".", "/")):
        if all((folder / name).is_file() for name in FILES):
            return folder
    raise PeerUnavailable(f"--weaver {given} holds no {' and '.join(FILES)}")


def load_functions(folder: Path) -> tuple[dict[str, Callable[..., Any]], str]:
    """Execute Weaver's files without importing SGLang.

    Returns:
        The functions by name, and a label with the hash of the kernel file.

    Raises:
        PeerUnavailable: a file does not load here; the message holds the cause.
    """
    digest = hashlib.sha256((folder / FILES[1]).read_bytes()).hexdigest()
    label = f"{FILES[1]} ({digest[:12]})"
    modules: dict[str, ModuleType] = {}
    # The second file imports names of the first; both live under names of the benchmark's own.
    build = execute(folder / FILES[0], "build_tree_structure_into_fast", label, modules, "weaver")
    stand_in = packages(modules, f"{PACKAGE}.{FILES[0].removesuffix('.py')}")
    vars(stand_in).update({n: v for n, v in build.__globals__.items() if not n.startswith("__")})
    allocate = build.__globals__.get("alloc_tree_structure_buffers")
    if allocate is None:
        raise PeerUnavailable(f"weaver {label} has no alloc_tree_structure_buffers")
    verify = execute(folder / FILES[1], ENTRY, label, modules, "weaver")
    return {"build": build, "allocate": allocate, "verify": verify}, label


class PreparedWeaver:
    """The kernels bound to the layers of one benchmark point."""

    launches = 4

    def __init__(self, functions: dict[str, Callable[..., Any]], inputs: VerifyInputs, precision: str) -> None:
        """Build the structure of the trees, as the benchmark builds Bole's, outside what is timed."""
        work = inputs.workload
        self._verify, self._inputs, self._precision = functions["verify"], inputs, precision
        # What earlier points left is of other sizes.
        self._scratch().clear()
        device = inputs.parents.device
        buffers = functions["allocate"](work.batch, work.nodes, inputs.depth, device)
        self._tree = functions["build"](inputs.parents, buffers)
        self._slots = inputs.slots.to(torch.int32)
        self._outputs: dict[int, Tensor] = {}
        self.workspace_bytes = workspace_bytes(work)

    def _scratch(self) -> dict[Any, Tensor]:
        """The workspaces that all its calls share."""
        return self._verify.__globals__["_WORKSPACE"]  # type: ignore[no-any-return]

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return the launches of layer ``index``."""
        layer = self._inputs.layers[index]
        arguments = {
            "A_log": layer.raw["A_log"],
            "a": layer.raw["a"],
            "dt_bias": layer.raw["dt_bias"],
            "softplus_beta": 1.0,
            "softplus_threshold": 20.0,
            "q": layer.q,
            "k": layer.k,
            "v": layer.v,
            "b": layer.raw["b"],
            "initial_state_source": layer.state,
            "initial_state_indices": self._slots,
            "tree": self._tree,
            "use_qk_l2norm_in_kernel": True,
            "precision": self._precision,
        }

        def launch() -> None:
            self._outputs[index] = self._verify(**arguments)

        return launch

    def output(self, index: int) -> Tensor:
        """Return the latest output of layer ``index``, ``[B, N, HV, dv]`` in the dtype of v."""
        return self._outputs[index]

    def poison(self) -> None:
        """Fill the shared workspaces with NaN."""
        for buffer in self._scratch().values():
            poison_(buffer)


def workspace_bytes(work: Workload) -> int:
    """Return the bytes of a call's scratch: beta, decays, A, the masked Q K, inverses and U, all fp32."""
    rows = -(-work.nodes // BLOCK) * BLOCK
    matrices = 2 * rows * rows + rows * BLOCK + rows * work.dv
    return 4 * work.batch * work.hv * (matrices + 2 * rows)


class Weaver:
    """The peers ``weaver-tf32`` and ``weaver-tf32x3``."""

    commits = False
    includes = "verify, trees built before"

    def __init__(self, functions: dict[str, Callable[..., Any]], version: str, precision: str) -> None:
        """Wrap loaded functions; use :meth:`load`."""
        self.name, self.version, self.profile = f"weaver-{precision}", version, PROFILES[precision]
        self._functions, self._precision = functions, precision

    @classmethod
    def load(cls, path: str | None, precision: str) -> Weaver:
        """Load from a path.

        Args:
            path: see :func:`locate`.
            precision: of its products, ``tf32`` or ``tf32x3``.

        Raises:
            PeerUnavailable: with the reason.
        """
        return cls(*load_functions(locate(path)), precision)

    def refuses(self, work: Workload) -> str | None:
        """Return why the kernels cannot serve a point, or None."""
        if work.family != "gdn":
            return f"is a kernel of gdn, not of {work.family}"
        return "has no pending chain" if work.pending else None

    def memory_bytes(self, work: Workload) -> int:
        """Bytes of the scratch, of the trees' structure and of a layer's output."""
        trees = 14 * work.batch * work.nodes * work.nodes
        return workspace_bytes(work) + trees + work.batch * work.nodes * work.hv * work.dv * 4

    def prepare(self, inputs: VerifyInputs, shape: str, scratch_budget: int) -> PreparedWeaver:
        """Bind to inputs.

        Raises:
            PeerRefuses: gates that the kernels do not read.
        """
        if not inputs.layers[0].raw:
            raise PeerRefuses("reads raw gates, which this point has not")
        return PreparedWeaver(self._functions, inputs, self._precision)
