"""The tables in the package: well formed, in canonical bytes, every entry usable by the declared space."""

from __future__ import annotations

from pathlib import Path

import pytest

import bole_tuned
from bole_runtime import gpus
from bole_runtime.kernels.problem import NODE_BUCKETS
from bole_runtime.kernels.variants import all_variants, get_variant
from bole_runtime.tables.load import dump, load_file, load_table
from bole_runtime.tables.lookup import Dispatcher

ROOT = Path(next(iter(bole_tuned.__path__)))
TABLES = sorted(ROOT.glob("*/*.json"))


def test_folders_are_gpu_keys() -> None:
    keys = {r.key for r in gpus.all_records()}
    assert {p.parent.name for p in TABLES} <= keys


@pytest.mark.parametrize("path", TABLES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_entry_is_usable_on_its_gpu(path: Path) -> None:
    table = load_table(path, all_variants)
    assert table.skipped == ()
    record = gpus.get(table.header.gpu.key)
    assert table.header.gpu.key == path.parent.name
    assert table.header.gpu.device_name in record.device_names
    for entry in table.entries:
        variant = get_variant(entry.problem.op, entry.config.variant)
        assert variant.reason(entry.problem, entry.config, record.limits()) is None, entry.key


@pytest.mark.parametrize("path", TABLES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_table_is_what_the_writer_would_write(path: Path) -> None:
    assert dump(load_file(path)) == path.read_bytes()


@pytest.mark.filterwarnings("ignore::bole_runtime.tables.lookup.TableWarning")
def test_every_gpu_gets_a_configuration_for_every_bucket() -> None:
    from bole_runtime.kernels.problem import Problem

    dispatcher = Dispatcher()
    for record in gpus.all_records():
        if not record.supported or not record.device_names:
            continue
        for nodes in NODE_BUCKETS[:3]:
            for op in ("verify", "commit"):
                problem = Problem(op, "gdn", 128, 128, 2, "bf16", "fp32", "raw", "lossless", nodes, nodes, 0, 256)
                found = dispatcher.resolve(problem, record.device_names[0], record.limits())
                variant = get_variant(op, found.config.variant)
                assert variant.reason(problem, found.config, record.limits()) is None
