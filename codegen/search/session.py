"""One run of ``bole-tune``: from targets to a written table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bole_codegen.measure.watch import Watch
from bole_codegen.render import render
from bole_codegen.search.driver import Driver
from bole_codegen.search.environment import Environment
from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.finish import Hints
from bole_codegen.search.journal import check_storage, open_storage
from bole_codegen.search.kinds import SEARCHED_OPS, kind_of, kind_of_op
from bole_codegen.search.outcome import Options, RunResult
from bole_codegen.search.progress import Progress
from bole_codegen.search.space import space_hash
from bole_codegen.search.store import Store
from bole_codegen.search.targets import Target
from bole_codegen.tables.kernels import write_kernels
from bole_codegen.tables.known_bad import KnownBad
from bole_codegen.tables.provenance import header
from bole_codegen.tables.writer import check_target, merge_entries
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.conv_problem import CONV_OPS
from bole_runtime.kernels.default import default_config
from bole_runtime.kernels.problem import OPS, Specialisation
from bole_runtime.kernels.space import Config, Variant
from bole_runtime.kernels.variants import all_variants
from bole_runtime.tables.load import load_table, table_path
from bole_runtime.tables.lookup import Dispatcher, tuned_roots
from bole_runtime.tables.schema import AnyEntry, Gpu, Header

#: Entries of tables that a bucket tries first.
NEAR = 2


@dataclass
class Session:
    """What a run needs, and what it has written.

    Attributes:
        record: the GPU.
        gpu: device and software, for the header.
        targets: buckets.
        evaluator: measures or predicts.
        options: how much to search.
        storage: journal file or database URL.
        out: folder of tables.
        fresh: forget earlier evaluations of these buckets.
        seed: of samplers.
        progress: what people see.
        begun: when the time budget began, of ``time.monotonic``.
        watch: of the devices; says what final timings ran at.
        paths: tables written so far.
        kept: keys whose measured entries were kept against predictions.
    """

    record: GpuRecord
    gpu: Gpu
    targets: Sequence[Target]
    evaluator: Evaluator
    options: Options
    storage: str
    out: Path
    fresh: bool
    seed: int
    progress: Progress
    variants: Callable[[str], Sequence[Variant]] = all_variants
    begun: float | None = None
    watch: Watch = field(default_factory=lambda: Watch(()))
    paths: list[Path] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    driver: Driver | None = None

    def run(self) -> RunResult:
        """Search, writing the table as classes finish.

        Raises:
            StorageError: the storage cannot be opened.
            TableError: a table to be written, or one beside it, cannot be read.
            WorkerStartError: workers do not start.
        """
        for problem in {t.problem.table: t.problem for t in self.targets}.values():
            # A table that cannot be rewritten must not cost a search first.
            check_target(self._path(problem.table), self._header(problem))
        for path in sorted((self.out / self.record.key).glob("*.json")):
            load_table(path, self.variants)  # All that lie there are read when kernels are written.
        check_storage(self.storage)
        # They take seconds to start, in which the rest is made ready.
        self.evaluator.start()
        declared = {(op, v.name): v for op in SEARCHED_OPS for v in self.variants(op)}
        store = Store(open_storage(self.storage), self.record.key, self._spaces(declared), declared, self.fresh)
        env = Environment(
            record=self.record,
            limits=self.record.limits(),
            variants=self.variants,
            default=default_config,
            render=render,
            store=store,
            seed=self.seed,
            known_bad=self._known_bad(),
        )
        hints = self._hints()
        self.driver = Driver(env, self.evaluator, self.options, hints, self._save, self.progress, self.begun)
        return self.driver.run(self.targets)

    def _spaces(self, declared: Mapping[tuple[str, str], Variant]) -> dict[str, str]:
        """Return the hash of each operation's space: one for the operations of a kind, which change together."""
        found = {}
        for ops in (OPS, CONV_OPS):
            protocol = kind_of_op(ops[0]).protocols[self.evaluator.label]
            variants = [v for (op, _), v in declared.items() if op in ops]
            space = space_hash(variants, self.evaluator.label, self.gpu.triton, protocol)
            found.update(dict.fromkeys(ops, space))
        return found

    def _path(self, table: str) -> Path:
        return table_path(self.out, self.record.key, table)

    def _header(self, problem: Specialisation) -> Header:
        gpu = msgspec.structs.replace(self.gpu, clocks=self.watch.line() or self.gpu.clocks)
        return header(gpu, problem.table, kind_of(problem).protocols[self.evaluator.label])

    def _known_bad(self) -> KnownBad | None:
        """Return the list of known-bad kernels; without the GPU nothing is learnt and nothing is run."""
        if self.evaluator.label == "predicted" or not self.gpu.triton:
            return None
        roots = tuple(dict.fromkeys((self.out, *tuned_roots())))
        return KnownBad(roots, self.record.key, self.gpu.triton, self.fresh)

    def _save(self, entries: list[AnyEntry]) -> None:
        for table, problem in sorted({e.family: e.problem() for e in entries}.items(), key=lambda found: found[0]):
            merge = merge_entries(self._path(table), self._header(problem), [e for e in entries if e.family == table])
            if merge.path not in self.paths:
                self.paths.append(merge.path)
            self.kept += merge.kept
        try:
            write_kernels(self.out / self.record.key, render, self.variants)
        except OSError as error:
            # They are for people to read, and the table is written: no reason to lose the rest of a search.
            self.progress.note(f"the kernels of the table cannot be written beside it: {error}")

    def _hints(self) -> Callable[[Target], Hints]:
        roots = tuple(dict.fromkeys((self.out, *tuned_roots())))
        keys = (self.record.key, self.record.tables_from)
        tables = Dispatcher(roots, user_roots=1, variants=self.variants, gpus=lambda name: keys)
        found: dict[Target, Hints] = {}

        def hints(target: Target) -> Hints:
            # Read once: what this very run writes is no incumbent.
            if target not in found:
                held = None
                near: list[Config] = []
                for key, entry in tables.ranked(target.problem, self.record.title):
                    if key == self.record.key and entry.problem == target.problem and held is None:
                        held = entry.config
                    elif len(near) < NEAR:
                        near.append(entry.config)
                found[target] = Hints(held, tuple(near))
            return found[target]

        for target in self.targets:
            hints(target)
        return hints
