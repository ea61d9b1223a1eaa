"""Registration: everything is checked, then all hooks are set, or SGLang does not start."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from bole_runtime.integrations.sglang import seams
from bole_runtime.integrations.sglang.budget_seams import BUDGET_READ, DRAFTED, ROUND, WORKER
from bole_runtime.integrations.sglang.options import SWITCH, read_options

logger = logging.getLogger(__name__)


def hooks() -> dict[seams.Seam, Callable[..., Any]]:
    """Return what runs around each seam."""
    from bole_runtime.integrations.sglang import gdn, kda, mamba2, memory, rounds

    return {
        seams.GDN: gdn.forward_extend,
        seams.KDA: kda.forward_extend,
        seams.MAMBA2: mamba2.forward,
        seams.COMMIT: rounds.commit,
        seams.POOL: memory.pool_init,
        seams.RESERVE: memory.reserve,
    }


def budget_hooks() -> dict[seams.Seam, Callable[..., Any]]:
    """Return what runs around each seam of the budget."""
    from bole_runtime.integrations.sglang import budget, drafted

    return {WORKER: budget.worker_init, ROUND: budget.forward_batch, DRAFTED: drafted.organize}


def register() -> None:
    """Entry point in the group ``sglang.srt.plugins``. Does nothing unless ``BOLE_SGLANG=1``.

    Raises:
        SystemExit: a seam is not as needed, or a variable is wrong. SGLang logs other exceptions of a plug-in and goes
            on without it.
    """
    try:
        options = read_options()
        if not options.enabled:
            return
        version = seams.installed_version()
        wanted = {**hooks(), **(budget_hooks() if options.budget else {})}
        read = (*seams.READ, *(BUDGET_READ if options.budget else ()))
        seams.check(version, seams.missing(seams=(*wanted, *read)))
        # SGLang resolves a hook's target by name and only logs a module that cannot be imported.
        for seam in wanted:
            importlib.import_module(seam.module)
    except (seams.SeamError, ValueError, ImportError) as error:
        print(f"bole: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for seam, hook in wanted.items():
        registry.HookRegistry.register(seam.target, hook, registry.HookType.AROUND)
    logger.info("bole: %s=1, SGLang %s: target verification is Bole's (%s)", SWITCH, version, options.precision)
