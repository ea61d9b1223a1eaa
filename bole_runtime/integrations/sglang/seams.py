"""What Bole needs of SGLang, as data: checked against source text, so without importing an engine or a GPU.

SGLang logs what a plug-in raises and goes on with its own path. A seam that moved would therefore cost its users the
memory and the speed they asked for, in silence; so everything is checked before anything is changed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Versions whose seams were read and tried.
KNOWN_VERSIONS = ("0.5.16", "0.5.23")


class SeamError(RuntimeError):
    """SGLang does not look as this plug-in needs it."""


@dataclass(frozen=True)
class Seam:
    """One place of SGLang that Bole changes or reads.

    Attributes:
        module: dotted name.
        name: function, ``Class.method`` or class in it.
        parameters: that it must take, in any order.
        mentions: names that its text must contain: what the hook relies on.
        does: what Bole does there, for the documentation; empty for what is only read.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    does: str = ""

    @property
    def target(self) -> str:
        """Dotted name that SGLang's hook registry takes."""
        return f"{self.module}.{self.name}"


_LINEAR = "sglang.srt.layers.attention.linear"
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_MEMORY = "sglang.srt.mem_cache.memory_pool"
_SIZES = "sglang.srt.mem_cache.kv_cache_configurator"
_LINKS = ("retrieve_next_token", "retrieve_next_sibling")
_HEADS = ("num_q_heads", "num_k_heads", "num_v_heads", "head_q_dim", "head_k_dim", "head_v_dim")

GDN = Seam(
    f"{_LINEAR}.gdn_backend",
    "GDNAttnBackend.forward_extend",
    ("layer", "forward_batch", "mixed_qkv", "a", "b"),
    (
        "is_target_verify", "mamba_cache_indices", *_LINKS, "conv_weights", "activation", *_HEADS, "draft_token_num",
        "mamba2_layer_cache", "A_log", "dt_bias",
    ),
    "Gated DeltaNet: convolves and verifies all nodes of every tree at once; factors are kept instead of a state and a "
    "window a node",
)  # fmt: skip
KDA = Seam(
    f"{_LINEAR}.kda_backend",
    "KDAAttnBackend.forward_extend",
    ("layer", "forward_batch", "mixed_qkv", "a", "b"),
    ("is_target_verify", "_forward_target_verify", "mamba_cache_indices", "mamba2_layer_cache"),
    "KDA: the same, with a decay a key channel",
)
MAMBA2 = Seam(
    _HYBRID,
    "Mamba2AttnBackend.forward",
    ("mixer", "hidden_states", "output", "layer_id", "forward_batch", "mup_vector"),
    ("mamba2_layer_cache", "forward_metadata", "num_decodes"),
    "Mamba2: the same, between the mixer's own projections and gated norm",
)
COMMIT = Seam(
    _HYBRID,
    "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
    ("last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track"),
    ("linear_attn_backend", "forward_metadata", "mamba_cache_indices", "get_speculative_mamba2_params_all_layers"),
    "rebuilds the accepted states of all layers in one launch, and those that the prefix cache tracks",
)
POOL = Seam(
    _MEMORY,
    "MambaPool.__init__",
    ("size", "spec_state_size", "cache_params", "speculative_num_draft_tokens"),
    ("mamba_cache", "intermediate_ssm", "intermediate_conv_window", "SpeculativeState"),
    "leaves the snapshots of states and windows out",
)
RESERVE = Seam(
    _SIZES,
    "KVCacheConfigurator._handle_max_mamba_cache",
    ("total_rest_memory",),
    ("speculative_num_draft_tokens", "max_mamba_cache_size", "mamba_cache_per_req"),
    "reserves what the factors take instead of the snapshots, so that the KV cache and the requests grow",
)
CHANGED = (GDN, KDA, MAMBA2, COMMIT, POOL, RESERVE)
KIMI_FORWARD = Seam(
    "sglang.srt.models.kimi_linear",
    "KimiDeltaAttention.forward",
    ("hidden_states", "forward_batch"),
    ("is_decode", "attn", "mixed_qkv"),
)
READ = (
    KIMI_FORWARD,
    Seam(
        f"{_LINEAR}.kda_backend",
        "KDAAttnBackend._forward_target_verify",
        ("layer", "forward_batch", "mixed_qkv", "a", "b"),
        (
            *_LINKS, "conv_weights", "bias", "transpose", "silu", "q_dim", "k_dim", "v_dim", "A_log", "dt_bias",
            "draft_token_num", "target_verify",
        ),
    ),
    Seam(
        f"{_LINEAR}.kernels.kda_triton",
        "TritonKDAKernel.target_verify",
        ("A_log", "dt_bias", "a", "b", "ssm_states"),
        ("fused_sigmoid_gating_delta_rule_update", "use_qk_l2norm_in_kernel", "is_kda"),
    ),
    Seam("sglang.srt.configs.mamba_utils", "KimiLinearStateShape.create", (), ("conv", "temporal", "divide")),
    Seam("sglang.srt.configs.mamba_utils", "BaseLinearStateParams.is_kda", ("self",)),
    Seam(
        "sglang.srt.layers.attention.mamba.mamba",
        "MambaMixer2.forward",
        ("hidden_states", "output", "layer_cache", "metadata", "mup_vector"),
        (
            "in_proj", "intermediate_size", "conv_dim", "num_heads", "n_groups", "ssm_state_size", "tp_size",
            "head_dim", "groups_ssm_state_size", "conv1d", "activation", "A", "D", "dt_bias", "dt_softplus",
            "is_target_verify", "selective_state_update", "norm", "out_proj", *_LINKS,
        ),
    ),
    Seam("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    Seam("sglang.srt.plugins.hook_registry", "HookRegistry.apply_hooks", (), ("_patched",)),
    Seam("sglang.srt.plugins.hook_registry", "HookType", (), ("AROUND",)),
    Seam(_MEMORY, "MambaPool.SpeculativeState", (), ("intermediate_ssm", "intermediate_conv_window")),
    Seam(_MEMORY, "HybridReqToTokenPool.get_speculative_mamba2_params_all_layers"),
    Seam(_HYBRID, "MambaAttnBackendBase._translate_mamba_indices"),
    Seam("sglang.srt.configs.hybrid_arch", "hybrid_gdn_config", ("model_config",)),
    Seam("sglang.srt.configs.hybrid_arch", "kimi_linear_config", ("model_config",), ("KimiLinearConfig",)),
    Seam(
        "sglang.srt.configs.hybrid_arch",
        "mamba2_config",
        ("model_config",),
        ("NemotronHConfig", "FalconH1Config", "GraniteMoeHybridConfig"),
    ),
    Seam("sglang.srt.configs.hybrid_arch", "mambaish_config", ("model_config",)),
)  # fmt: skip

Find = Callable[[str], "Path | None"]


def installed(module: str) -> Path | None:
    """Return the file of an installed module, without running it or the packages around it."""
    root, _, rest = module.partition(".")
    spec = importlib.util.find_spec(root)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((p for f in folders for p in _candidates(Path(f), rest)), None)


def unpacked(folder: Path) -> Find:
    """Return a search in an unpacked wheel or a source tree's ``python`` folder."""

    def find(module: str) -> Path | None:
        return next(_candidates(folder, module), None)

    return find


def _candidates(folder: Path, module: str) -> Iterator[Path]:
    path = folder.joinpath(*module.split("."))
    yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())


def installed_version() -> str:
    """Return the version of the installed SGLang.

    Raises:
        SeamError: there is none.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise SeamError("sglang is not installed beside bole") from None


def mentions(seam: Seam, word: str, find: Find = installed) -> bool:
    """Return whether the text of a seam that is there has a name in it: what tells versions apart.

    Raises:
        SeamError: the seam is not there.
    """
    path = find(seam.module)
    node = None if path is None else _resolve(ast.parse(path.read_text(encoding="utf-8")), seam.name.split("."))
    if node is None:
        raise SeamError(f"{seam.target}: not there")
    return word in _names(node)


def missing(find: Find = installed, seams: Sequence[Seam] = (*CHANGED, *READ)) -> list[str]:
    """Return what seams lack, one line each; empty when all are as needed."""
    found: list[str] = []
    trees: dict[str, ast.Module | None] = {}
    for seam in seams:
        if seam.module not in trees:
            path = find(seam.module)
            trees[seam.module] = None if path is None else ast.parse(path.read_text(encoding="utf-8"))
        tree = trees[seam.module]
        if tree is None:
            found.append(f"{seam.module}: no such module")
            continue
        node = _resolve(tree, seam.name.split("."))
        if node is None:
            found.append(f"{seam.target}: not there")
            continue
        lacking = [p for p in seam.parameters if p not in _parameters(node)]
        if lacking:
            found.append(f"{seam.target}: takes no {', '.join(lacking)}")
        names = _names(node)
        lacking = [m for m in seam.mentions if m not in names]
        if lacking:
            found.append(f"{seam.target}: does not know {', '.join(lacking)}")
    return found


def check(version: str, lines: Sequence[str]) -> None:
    """Raise for seams that are not as needed.

    Raises:
        SeamError: names the version and every seam.
    """
    if lines:
        known = ", ".join(KNOWN_VERSIONS)
        raise SeamError(
            f"SGLang {version} is not as Bole's plug-in needs it (it was written for {known}):\n  "
            + "\n  ".join(lines)
            + "\nUnset BOLE_SGLANG to run SGLang without Bole."
        )


def _resolve(tree: ast.AST, names: Sequence[str]) -> ast.AST | None:
    node: ast.AST | None = tree
    for name in names:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = getattr(node, "body", [])
        node = next((n for n in inside if isinstance(n, kinds) and n.name == name), None)
        if node is None:
            return None
    return node


def _parameters(node: ast.AST) -> set[str]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return set()
    given = node.args
    return {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _names(node: ast.AST) -> set[str]:
    """Every name, attribute, keyword and field in a piece of source."""
    found: set[str] = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            found.add(n.id)
        elif isinstance(n, ast.Attribute):
            found.add(n.attr)
        elif isinstance(n, (ast.keyword, ast.arg)) and n.arg:
            found.add(n.arg)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier():
            found.add(n.value)
    return found
