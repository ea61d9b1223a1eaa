"""What a run tells about itself while it goes on. The base class says nothing."""

from __future__ import annotations

from bole_codegen.search.results import Measurement, Screening
from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config


class Progress:
    """Hooks of a run, called in the process that drives it."""

    def begin(self, classes: int, buckets: int, candidates: int, finished: int) -> None:
        """Say what is ahead: classes, buckets and candidates to try, and the buckets that earlier runs finished."""

    def note(self, text: str) -> None:
        """Say one line."""

    def phase(self, text: str) -> None:
        """Say what is being done."""

    def screened(self, config: Config, result: Screening) -> None:
        """A candidate was compiled and checked."""

    def timed(self, target: Target, config: Config, result: Measurement) -> None:
        """A candidate was timed in a bucket."""

    def finished(self, target: Target, median_us: float | None, default_us: float | None) -> None:
        """A bucket is done."""

    def end(self) -> None:
        """The run is over, or was interrupted."""
