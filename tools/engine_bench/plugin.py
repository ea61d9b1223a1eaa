"""SGLang plug-in of the benchmark: aimed drafts, larger dummy weights, and times of the phases by CUDA events.

Loaded through the group ``sglang.srt.plugins`` of a folder that bench_sglang.py makes; ``BOLE_BENCH`` says what to do.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

#: Phase -> what is timed.
PHASES = {
    "draft": "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
    "verify": "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify",
    "forward": "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
    "draft extend": "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode",
}
_BATCH_ARGUMENT = 1


class _Phases:
    """Events around calls, read when they are done: nothing waits for the device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times: dict[str, list[float]] = defaultdict(list)
        self.open: deque[tuple[str, Any, Any]] = deque()
        atexit.register(self.save)

    def around(self, phase: str) -> Any:
        import torch

        def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                return original(*args, **kwargs)
            batch = args[_BATCH_ARGUMENT] if len(args) > _BATCH_ARGUMENT else None
            mode = getattr(getattr(batch, "forward_mode", None), "name", "")
            rows = len(getattr(batch, "seq_lens", ()) if batch is not None else ())
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = original(*args, **kwargs)
            end.record()
            self.open.append((f"{phase}/{mode}/{rows}", begin, end))
            while self.open and self.open[0][2].query():
                name, first, last = self.open.popleft()
                self.times[name].append(first.elapsed_time(last))
            if len(self.times[f"{phase}/{mode}/{rows}"]) % 20 == 1:
                self.save()  # a process that is killed at the end of a run keeps what it saw
            return result

        return hook

    def save(self) -> None:
        """Write medians, milliseconds."""
        medians = {n: {"ms": sorted(t)[len(t) // 2], "count": len(t)} for n, t in self.times.items() if t}
        if medians:
            self.path.write_text(json.dumps(medians))


def register() -> None:
    """Entry point."""
    import torch  # noqa: F401 - SGLang has it
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = json.loads(os.environ.get("BOLE_BENCH", "{}"))
    if wanted.get("phases"):
        phases = _Phases(Path(wanted["phases"]))
        for phase, target in PHASES.items():
            HookRegistry.register(target, phases.around(phase), HookType.AROUND)
    if wanted.get("texts"):
        from engine_bench.aim import Aim

        aim = Aim(Path(wanted["texts"]), Path(wanted["length"]), wanted["vocabulary"])

        def draft(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not batch.forward_mode.is_idle() and result.draft_token.numel():
                aim(batch.reqs, result)
            return result

        HookRegistry.register(PHASES["draft"], draft, HookType.AFTER)
    if wanted.get("weights"):
        high = float(wanted["weights"])

        def larger(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            return original(model, -high, high)

        HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", larger, HookType.AROUND)
