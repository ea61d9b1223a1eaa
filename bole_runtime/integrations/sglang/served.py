"""Which models the plug-in serves: decided once a process, before anything is allocated."""

from __future__ import annotations

import importlib
from typing import Any

_decided: bool | None = None


class NotServed(RuntimeError):
    """The plug-in was asked for, and cannot do it for this model."""


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
        kinds = importlib.import_module("sglang.srt.configs.hybrid_arch")
        if kinds.hybrid_gdn_config(model_config) is not None:
            _decided = True
        elif kinds.mambaish_config(model_config) is not None:
            name = type(kinds.mambaish_config(model_config)).__name__
            raise NotServed(
                f"Bole's plug-in serves Gated DeltaNet models (Qwen3.5, Qwen3-Next); this one has a {name}. "
                "Unset BOLE_SGLANG to run it without Bole."
            )
        else:
            _decided = False
    return bool(_decided)


def _check_hooks() -> None:
    """SGLang logs a hook that it could not set, and goes on."""
    from bole_runtime.integrations.sglang.seams import CHANGED

    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    lost = [seam.target for seam in CHANGED if seam.target not in registry._patched]
    if lost:
        raise NotServed(f"SGLang did not set Bole's hooks on {', '.join(lost)}; its log says why")
