"""Which models the plug-in serves: decided once a process, before anything is allocated."""

from __future__ import annotations

import importlib
from typing import Any

#: Families, and what is said of them.
FAMILIES = {
    "gdn": "Gated DeltaNet (Qwen3.5, Qwen3-Next)",
    "kda": "KDA (Kimi Linear, Ling, GLM)",
    "mamba2": "Mamba2 (Nemotron-H, Falcon-H1, Granite 4)",
}
#: Configurations that SGLang counts as Gated DeltaNet: Jet-Nemotron's layers do not go through its backend, and
#: Qwen4-Exp has states beside the recurrent ones.
_NO_GDN = ("JetNemotron", "JetVLM", "Qwen4Exp")
#: Configurations whose layers are MambaMixer2 behind a hybrid backend; what else SGLang counts as Mamba2 is Mamba1, a
#: pure Mamba2 without attention (no commit to hook), or a short convolution.
_MAMBA2 = ("NemotronHConfig", "FalconH1Config", "GraniteMoeHybridConfig")

_decided: bool | None = None


class NotServed(RuntimeError):
    """The plug-in was asked for, and cannot do it for this model."""


def family_of(model_config: Any) -> str | None:
    """Return the family of a model's recurrent layers, asked in the order in which SGLang chooses its backend.

    Args:
        model_config: SGLang's.

    Returns:
        A name in ``FAMILIES``; None for a model without recurrent layers.

    Raises:
        NotServed: recurrent layers that Bole does not take over.
    """
    kinds = importlib.import_module("sglang.srt.configs.hybrid_arch")
    config = kinds.mambaish_config(model_config)
    if config is None:
        return None
    names = [kind.__name__ for kind in type(config).__mro__]
    if kinds.hybrid_gdn_config(model_config) is not None:
        if not names[0].startswith(_NO_GDN):
            return "gdn"
    elif kinds.mamba2_config(model_config) is not None:
        if any(name in _MAMBA2 for name in names):
            return "mamba2"
    # Since 0.5.23 other models than Kimi's have KDA layers.
    elif getattr(kinds, "hybrid_kda_config", kinds.kimi_linear_config)(model_config) is not None:
        return "kda"
    raise NotServed(
        f"Bole's plug-in serves {', '.join(FAMILIES.values())}; this model has a {names[0]}. "
        "Unset BOLE_SGLANG to run it without Bole."
    )


def served(model_config: Any = None) -> bool:
    """Return whether this process runs a model that Bole takes over.

    Args:
        model_config: SGLang's, where it is at hand; the answer is kept.

    Raises:
        NotServed: a recurrent model of another family, or a hook that is not in place: Bole was asked for, so the
            engine must not go on without it.
    """
    global _decided
    if model_config is not None and _decided is None:
        _check_hooks()
        _decided = family_of(model_config) is not None
    return bool(_decided)


def _check_hooks() -> None:
    """SGLang logs a hook that it could not set, and goes on."""
    from bole_runtime.integrations.sglang.budget_seams import BUDGET_CHANGED
    from bole_runtime.integrations.sglang.options import read_options
    from bole_runtime.integrations.sglang.seams import CHANGED

    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    wanted = (*CHANGED, *(BUDGET_CHANGED if read_options().budget else ()))
    lost = [seam.target for seam in wanted if seam.target not in registry._patched]
    if lost:
        raise NotServed(f"SGLang did not set Bole's hooks on {', '.join(lost)}; its log says why")
