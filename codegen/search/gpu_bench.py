"""What runs candidates on the GPU, inside a worker process: checks, quick times, final times.

Kernels come compiled from Triton's cache. A first launch, which loads them, and the capture of graphs do not hold the
device; checks and timed replays take turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from bole_codegen.measure import CaptureError, Timing, capture_layers, copy_bandwidth, time_interleaved
from bole_codegen.search import phases
from bole_codegen.search.device_lock import device_lock
from bole_codegen.search.kinds import Bucket, Check, kind_of
from bole_codegen.search.results import CandidateError, Failed, Timed
from bole_codegen.search.targets import Target
from bole_runtime import Config
from bole_runtime.kernels.problem import Specialisation

#: Part of the device's memory that must be free before another bucket is drawn beside those that are kept.
FREE_SHARE = 0.4
#: Checks whose inputs stay on the device.
KEEP_CASES = 16
#: Timed replays of a quick timing.
QUICK_REPLAYS = 7
_COMPILE_ERRORS = {"CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "PTXASError"}


def classify(error: BaseException) -> CandidateError:
    """Return what an exception of a candidate means. Asks the device whether it still works."""
    chain: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and len(chain) < 8:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__
    lines = [(type(e).__name__, str(e).strip().splitlines()) for e in chain]
    text = "; ".join(f"{name}: {line[-1]}" if line else name for name, line in lines)
    names = {name for name, _ in lines}
    poisoned = False
    try:
        torch.cuda.synchronize()
    except Exception:
        poisoned = True
    if isinstance(error, CandidateError):
        return CandidateError(error.kind, error.message, error.fatal or poisoned)
    if poisoned or "illegal memory access" in text or "misaligned address" in text:
        return CandidateError("illegal", text, fatal=True)
    if "OutOfResources" in names:
        return CandidateError("resources", text)
    if names & _COMPILE_ERRORS or "PassManager" in text or "ptxas" in text:
        return CandidateError("compile", text)
    return CandidateError("error", text)


class GpuBench:
    """Checks and times candidates on one CUDA device.

    Args:
        device: index.
        seed: of all inputs.
        l2_bytes: L2 capacity, for the number of layers.
        memory_share: part of the free memory that one bucket's inputs may take.
        locks: folder of device locks, None for none.
    """

    def __init__(
        self, device: int, seed: int, l2_bytes: int, memory_share: float = 0.6, locks: Path | None = None
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device is available")
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
        self._device = f"cuda:{device}"
        self._seed = seed
        self._l2 = l2_bytes
        self._share = memory_share
        self._lock = device_lock(locks, device)
        self._cases: OrderedDict[Specialisation, Check] = OrderedDict()
        self._buckets: OrderedDict[Target, Bucket] = OrderedDict()

    def bandwidth(self) -> float:
        """Measure the copy bandwidth, 1e9 bytes a second."""
        with self._lock.held("time"):
            return copy_bandwidth(device=self._device)

    def gate(self, problem: Specialisation, config: Config) -> float:
        """Check the launch that is timed, its output in the type of the inputs; return its relative error.

        Raises:
            CandidateError: it does not count; see ``results.KINDS``.
        """
        return self._checked(problem, config, full=False)

    def check(self, problem: Specialisation, config: Config) -> float:
        """Check every form of launch, fp32 output against the fp64 reference; return the relative error.

        Raises:
            CandidateError: it does not count.
        """
        return self._checked(problem, config, full=True)

    def _checked(self, problem: Specialisation, config: Config, full: bool) -> float:
        try:
            phases.enter("check")
            case = self._case(problem)
            # Loads the kernels, which takes longer than the check itself, and finds those that never end.
            case.launch(config, full)
            torch.cuda.synchronize()
            with self._lock.held("check"):
                error = case.run(config) if full else case.gate(config)
                torch.cuda.synchronize()
        except Exception as found:
            raise classify(found) from found
        return error

    def _case(self, problem: Specialisation) -> Check:
        if problem not in self._cases:
            self._cases[problem] = kind_of(problem).check(problem, self._device, self._seed)
            while len(self._cases) > KEEP_CASES:
                self._cases.popitem(last=False)
        self._cases.move_to_end(problem)
        return self._cases[problem]

    def quick(self, target: Target, config: Config) -> Timed:
        """Time a candidate with few replays.

        Raises:
            CandidateError: it cannot run in this bucket.
        """
        make, nodes, layers = self._open(target).launches(config)
        phases.enter("time")
        try:
            with capture_layers(make, nodes, 1) as graph, self._lock.held("time"):
                return _timed(time_interleaved({"": graph}, QUICK_REPLAYS, warmup_ms=1.0)[""], layers)
        except CaptureError as error:
            raise classify(error) from error

    def finals(self, target: Target, configs: Sequence[Config], replays: int) -> list[Timed | Failed]:
        """Check finalists at full size, then time them in one run, one replay of each in turn.

        Returns:
            For each configuration its time, or why it does not count.

        Raises:
            CandidateError: one of them broke the device; nothing was timed.
        """
        opened = self._open(target)
        phases.enter("finals")
        results: list[Timed | Failed] = []
        layers = 1
        with ExitStack() as stack:
            graphs = {}
            for i, config in enumerate(configs):
                try:
                    opened.spot_check(config)
                    make, nodes, layers = opened.launches(config)
                    graphs[str(i)] = stack.enter_context(capture_layers(make, nodes, 1))
                    results.append(Timed(0.0, 0.0))
                except Exception as error:
                    found = classify(error)
                    if found.fatal:
                        raise CandidateError(found.kind, f"{config}: {found.message}", fatal=True) from error
                    results.append(Failed(found.kind, found.message))
            with self._lock.held("finals"):
                times = time_interleaved(graphs, replays) if graphs else {}
        for name, timing in times.items():
            results[int(name)] = _timed(timing, layers)
        return results

    def floor_bytes(self, target: Target) -> int:
        """Return the fewest bytes of a layer: state, inputs and outputs once."""
        return self._open(target).floor_bytes()

    def _open(self, target: Target) -> Bucket:
        kind = kind_of(target.problem)
        key = kind.shared(target)
        if key in self._buckets:
            self._buckets.move_to_end(key)
            return self._buckets[key].serving(target)
        _, total = torch.cuda.mem_get_info()
        while self._buckets and self._free() < FREE_SHARE * total:
            self._buckets.popitem(last=False)
        try:
            layers = kind.layer_count(target, self._l2, int(self._free() * self._share))
        except CandidateError:
            self._buckets.clear()
            torch.cuda.empty_cache()
            layers = kind.layer_count(target, self._l2, int(self._free() * self._share))
        self._buckets[key] = kind.open(target, layers, self._seed, self._device)
        return self._buckets[key].serving(target)

    @staticmethod
    def _free() -> int:
        """Return the bytes that can be allocated: free on the device, or held by torch for nothing."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _timed(timing: Timing, layers: int) -> Timed:
    return Timed(timing.median_us / layers, timing.spread_us / layers, timing.layers * layers)
