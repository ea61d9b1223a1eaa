"""Finished evaluations, kept in an Optuna storage so that an interrupted run goes on where it stopped.

One study a bucket. Its name holds the GPU, the key and a hash of the declared space, so that a changed space starts
anew. A trial is written once, when it is finished: a killed process leaves none behind that is half done.
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import TrialState, create_trial

from bole_codegen.search.claims import Claims
from bole_codegen.search.journal import StorageError
from bole_codegen.search.patience import Deleted, Patience
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

    Attributes:
        ask: waits for the storage, for everything that is asked of it.
        claims: which run searches what.

    Every method may have to wait for the storage, but those that write to a database, and raises a
    :class:`~bole_codegen.search.journal.StorageError` where it cannot be used, or could not for an earlier write.
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
        self.ask = Patience(storage)
        self.claims = Claims(storage, self.ask)
        fast = isinstance(storage, JournalStorage)
        self._writer = None if fast else ThreadPoolExecutor(1, "bole-store")
        self._failed: Exception | None = None

    def name(self, target: Target) -> str:
        """Return the study name of a bucket: times are of one launch, and say nothing of another."""
        launch = f"{target.hk}x{target.hv}-b{target.batch}-{target.shape}"
        return f"{self._gpu}/{target.problem.key()}/{launch}@{self._space_of(target.problem)}"

    def class_name(self, problem: Specialisation) -> str:
        """Return the name that a class is claimed by."""
        return f"{self._gpu}/{problem.key()}@{self._space_of(problem)}"

    def _space_of(self, problem: Specialisation) -> str:
        return self._space if isinstance(self._space, str) else self._space[problem.op]

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
            with contextlib.suppress(Deleted):
                name = self.name(target)
                self.ask(lambda name=name: optuna.delete_study(study_name=name, storage=self._storage))  # type: ignore[misc]

    def load(self, target: Target) -> list[tuple[int, Record]]:
        """Return the finished evaluations of a bucket, oldest first, with their places; damaged ones are left out."""
        # Those that were written twice too, since the answer of a database was lost.
        first = {str(trial.user_attrs.get("record")): trial.number for trial in reversed(self._trials(target))}
        found = ((number, self._record(target, text)) for text, number in sorted(first.items(), key=lambda f: f[1]))
        return [(number, record) for number, record in found if record is not None]

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
            "id": uuid.uuid4().hex,
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
        """Wait until everything is written."""
        if self._writer is not None:
            self._writer.submit(int).result()
        self._raise()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _write(self, target: Target, work: Callable[[optuna.Study], object]) -> None:
        """Write to the storage; aside, one after the other, where that takes as long as a database does."""

        def call() -> None:
            try:
                self.ask(lambda: work(self._study(target)))
            except Exception as error:
                self._failed = self._failed or error

        self._raise()
        if self._writer is None:
            call()
            self._raise()
        else:
            self._writer.submit(call)

    def _read(self, target: Target, name: str) -> dict[str, Any] | None:
        text = self.ask(lambda: self._study(target).user_attrs.get(name))
        try:
            data = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def _keep(self, target: Target, name: str, data: Mapping[str, Any] | None) -> None:
        text = json.dumps(data, sort_keys=True)
        self._write(target, lambda study: study.set_user_attr(name, text))

    def _trials(self, target: Target) -> list[optuna.trial.FrozenTrial]:
        return self.ask(lambda: self._study(target).get_trials(deepcopy=False))

    def _study(self, target: Target) -> optuna.Study:
        name = self.name(target)
        with self._lock:
            if name not in self._studies:
                self._studies[name] = optuna.create_study(
                    study_name=name, storage=self._storage, direction="minimize", load_if_exists=True
                )
            return self._studies[name]

    def _record(self, target: Target, text: str) -> Record | None:
        """Rebuild a record; a journal is a file that others may have edited, so every value is checked."""
        try:
            kept = json.loads(text)
            variant = self._variants[target.problem.op, kept["variant"]]
            config = variant.config(kept["params"])
            texts = kept["texts"]
            if not _strings(texts):
                return None
            error = None if kept.get("error") is None else _number(kept["error"])
            # Journals of before know no stages.
            stage = kept.get("stage", "time" if kept.get("kind") is None else "check")
            if stage not in STAGES:
                return None
            outcome: Timed | Failed
            if kept.get("kind") is not None:
                if kept["kind"] not in KINDS or kept["kind"] in PASSING_KINDS:
                    return None
                outcome = Failed(kept["kind"], str(kept.get("reason", ""))[:300])
            else:
                layers = kept.get("layers", 0)
                outcome = Timed(_number(kept["median_us"]), _number(kept["spread_us"]), int(_number(layers)))
                if outcome.median_us == 0.0:
                    return None
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
            return None
        return Record(config, tuple(texts), outcome, error, stage)


def _number(value: Any) -> float:
    """Return a number that a time or an error may be.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e9:
        raise ValueError(f"{value!r} is no such number")
    return float(value)


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
