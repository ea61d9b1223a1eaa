"""Finished evaluations, kept in an Optuna storage so that an interrupted run goes on where it stopped.

One study a bucket. Its name holds the GPU, the key and a hash of the declared space, so that a changed space starts
anew. A trial is written once, when it is finished: a killed process leaves none behind that is half done.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import TrialState, create_trial

from bole_codegen.search.claims import Claims
from bole_codegen.search.journal import StorageError
from bole_codegen.search.results import KINDS, PASSING_KINDS, Failed, Timed
from bole_codegen.search.sampler import trial_params
from bole_codegen.search.targets import Target
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, Variant

optuna.logging.set_verbosity(optuna.logging.WARNING)

#: What an evaluation can come from: compiling and the first check, a quick time, the full check, finalists compared.
STAGES = ("check", "time", "full", "finals")


@dataclass(frozen=True)
class Record:
    """One finished evaluation.

    Attributes:
        config: what was tried.
        texts: text hash of each kernel; an evaluation of other text says nothing about today's.
        outcome: the time, or why the candidate does not count.
        error: relative error of the check, None when it did not run.
        stage: what it comes from, of :data:`STAGES`.
    """

    config: Config
    texts: tuple[str, ...]
    outcome: Timed | Failed
    error: float | None = None
    stage: str = "time"


class Store:
    """Evaluations of a run, by bucket.

    Args:
        storage: as :func:`bole_codegen.search.journal.open_storage` gives it.
        gpu: key of the GPU.
        space: hash of the declared space and the protocol; or one an operation.
        variants: declared variants by (op, name).
        fresh: whether :meth:`begin` forgets what is stored.
    """

    def __init__(
        self,
        storage: BaseStorage,
        gpu: str,
        space: str | Mapping[str, str],
        variants: Mapping[tuple[str, str], Variant],
        fresh: bool = False,
    ) -> None:
        self._storage = storage
        self._gpu = gpu
        self._space = space
        self._variants = variants
        self._fresh = fresh
        self._lock = threading.RLock()
        self._studies: dict[str, optuna.Study] = {}
        self.claims = Claims(storage)
        fast = isinstance(storage, JournalStorage)
        self._writer = None if fast else ThreadPoolExecutor(1, "bole-store")
        self._pending: deque[Future[object]] = deque()

    def name(self, target: Target) -> str:
        """Return the study name of a bucket."""
        return self.class_name(target.problem)

    def class_name(self, problem: Specialisation) -> str:
        """Return the name that a class is claimed by."""
        space = self._space if isinstance(self._space, str) else self._space[problem.op]
        return f"{self._gpu}/{problem.key()}@{space}"

    def begin(self, targets: Iterable[Target]) -> None:
        """Forget what is stored for these buckets, if this run is to start anew.

        Raises:
            StorageError: another run is at work on such buckets and would lose what it has.
        """
        if not self._fresh:
            return
        spaces = {self._space} if isinstance(self._space, str) else set(self._space.values())
        # Of any class, not of these alone: a run has claimed those under way, and has read those that it will do next.
        who = self.claims.others(lambda name: name.startswith(f"{self._gpu}/") and name.rpartition("@")[2] in spaces)
        if who:
            raise StorageError(
                f"--fresh forgets evaluations that another run ({who}) works with; end that run or wait for it, leave "
                "--fresh out to share the work with it, or give another place to --storage"
            )
        for target in targets:
            with contextlib.suppress(KeyError):
                optuna.delete_study(study_name=self.name(target), storage=self._storage)

    def load(self, target: Target) -> list[tuple[int, Record]]:
        """Return the finished evaluations of a bucket, oldest first, with their places; damaged ones are left out."""
        found = []
        for trial in self._trials(target):
            record = self._record(target, trial.user_attrs)
            if record is not None:
                found.append((trial.number, record))
        return found

    def count(self, target: Target) -> int:
        """Return how many evaluations of a bucket are kept, damaged ones included."""
        return len(self._trials(target))

    def add(self, target: Target, record: Record) -> None:
        """Keep one finished evaluation; not one that ended before the candidate ran, which is to be tried again."""
        if isinstance(record.outcome, Failed) and record.outcome.kind in PASSING_KINDS:
            return
        variant = self._variants[target.problem.op, record.config.variant]
        params, distributions = trial_params(variant, record.config)
        kept: dict[str, Any] = {
            "variant": record.config.variant,
            "params": record.config.as_dict(),
            "texts": list(record.texts),
            "error": record.error,
            "stage": record.stage,
        }
        if isinstance(record.outcome, Timed):
            state, value = TrialState.COMPLETE, record.outcome.median_us
            kept.update(median_us=value, spread_us=record.outcome.spread_us, layers=record.outcome.layers)
        else:
            state, value = TrialState.FAIL, None
            kept.update(kind=record.outcome.kind, reason=record.outcome.message[:300])
        trial = create_trial(
            state=state,
            value=value,
            params=params,
            distributions=distributions,
            # One attribute: each is a row of a database.
            user_attrs={"record": json.dumps(kept)},
        )
        self._write(target, lambda study: study.add_trial(trial))

    def final(self, target: Target) -> dict[str, Any] | None:
        """Return what :meth:`set_final` kept for a bucket, None when it was not finished."""
        return self._read(target, "final")

    def set_final(self, target: Target, data: Mapping[str, Any]) -> None:
        """Keep the finished result of a bucket."""
        self._keep(target, "final", data)

    def plan(self, target: Target) -> dict[str, Any] | None:
        """Return what :meth:`set_plan` kept, None when the class of this bucket is not being searched."""
        return self._read(target, "plan")

    def set_plan(self, target: Target, data: Mapping[str, Any] | None) -> None:
        """Keep how the class is searched whose first bucket this is; None when it is done."""
        self._keep(target, "plan", data)

    def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            Exception: what a write failed with.
        """
        while self._pending:
            self._pending.popleft().result()

    def _write(self, target: Target, work: Callable[[optuna.Study], object]) -> None:
        """Write to the storage; aside, one after the other, where that takes as long as a database does."""

        def call() -> None:
            with self._there():
                work(self._study(target))

        if self._writer is None:
            call()
            return
        self._pending.append(self._writer.submit(call))
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def _read(self, target: Target, name: str) -> dict[str, Any] | None:
        with self._there():
            text = self._study(target).user_attrs.get(name)
        try:
            data = json.loads(text) if isinstance(text, str) else None
        except ValueError:
            return None
        return data if isinstance(data, dict) else None

    def _keep(self, target: Target, name: str, data: Mapping[str, Any] | None) -> None:
        text = json.dumps(data, sort_keys=True)
        self._write(target, lambda study: study.set_user_attr(name, text))

    def _trials(self, target: Target) -> list[optuna.trial.FrozenTrial]:
        with self._there():
            return self._study(target).get_trials(deepcopy=False)

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        """Say what it means when a study that was opened is not there any more."""
        try:
            yield
        except KeyError as error:
            raise StorageError(
                "what this search had kept was deleted from the storage while it ran, by a run with --fresh or by "
                "someone; the same command begins anew"
            ) from error

    def _study(self, target: Target) -> optuna.Study:
        name = self.name(target)
        with self._lock:
            if name not in self._studies:
                self._studies[name] = optuna.create_study(
                    study_name=name, storage=self._storage, direction="minimize", load_if_exists=True
                )
            return self._studies[name]

    def _record(self, target: Target, attrs: Mapping[str, Any]) -> Record | None:
        """Rebuild a record; a journal is a file that others may have edited, so every value is checked."""
        try:
            attrs = json.loads(attrs["record"])
            variant = self._variants[target.problem.op, attrs["variant"]]
            config = variant.config(attrs["params"])
            texts = attrs["texts"]
            error = attrs.get("error")
            if not _strings(texts) or not (error is None or isinstance(error, float | int)):
                return None
            # Journals of before know no stages.
            stage = attrs.get("stage", "time" if attrs.get("kind") is None else "check")
            if stage not in STAGES:
                return None
            outcome: Timed | Failed
            if attrs.get("kind") is not None:
                if attrs["kind"] not in KINDS:
                    return None
                outcome = Failed(attrs["kind"], str(attrs.get("reason", ""))[:300])
            else:
                outcome = Timed(float(attrs["median_us"]), float(attrs["spread_us"]), int(attrs.get("layers", 0)))
                if not 0.0 < outcome.median_us < 1e9:
                    return None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return Record(config, tuple(texts), outcome, error, stage)


def _strings(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) for v in value)
