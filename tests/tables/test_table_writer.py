"""Merging under a lock: nothing finished is lost, whatever other writers do or die of."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
import table_fakes as fakes

from bole_codegen.tables import LockTimeout, merge_entries, stale_entries
from bole_codegen.tables import writer as writer_module
from bole_codegen.tables.kernels import write_kernels
from bole_runtime.tables.load import TableError, load_file, load_table
from bole_runtime.tables.schema import Entry, Header, KernelRef

P = fakes.PROBLEM


def header(triton: str = "3.6.0", gpu: str = "h200", date: str = "2026-01-02") -> Header:
    return msgspec.structs.replace(fakes.table(gpu=gpu, triton=triton).header(), date=date)


def numbered(i: int) -> Entry:
    return fakes.entry(P.replace(work=1 << (i % 20), group=1 + i // 20))


def _write_some(path: str, first: int, count: int) -> None:
    for i in range(first, first + count):
        merge_entries(Path(path), header(), [numbered(i)])


def _die_in_the_middle(path: str) -> None:
    merge_entries(Path(path), header(), [numbered(60)])

    def half(target: Path, data: bytes) -> None:
        (target.parent / f".{target.name}.dead.tmp").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    writer_module.write_atomically = half
    merge_entries(Path(path), header(), [numbered(61)])


def test_four_writers_one_killed_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "gdn.json"
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_write_some, args=(str(path), 20 * i, 15)) for i in range(3)]
    dead = context.Process(target=_die_in_the_middle, args=(str(path),))
    for job in (*jobs, dead):
        job.start()
    for job in (*jobs, dead):
        job.join(60)
    assert dead.exitcode == -signal.SIGKILL
    assert [j.exitcode for j in jobs] == [0, 0, 0]
    merge_entries(path, header(), [numbered(62)])
    want = {numbered(20 * i + j).key() for i in range(3) for j in range(15)} | {numbered(i).key() for i in (60, 62)}
    assert {e.key() for e in load_file(path).entries} == want
    assert [p.name for p in path.parent.iterdir()] == ["gdn.json"]


def test_rewriting_the_same_entries_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "gdn.json"
    entries = [numbered(i) for i in range(5)]
    merge_entries(path, header(), entries)
    before, stamp = path.read_bytes(), path.stat().st_mtime_ns
    merge = merge_entries(path, header(), list(reversed(entries)))
    assert (merge.added, len(merge.replaced)) == ((), 5)
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns == stamp
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_prediction_never_replaces_a_measurement(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "gdn.json"
    merge_entries(path, header(), [numbered(0)])
    guess = [fakes.entry(numbered(i).problem(), label="predicted", median_us=1.0) for i in (0, 1)]
    merge = merge_entries(path, header(triton="3.7.0", date="2026-05-05"), guess)
    assert (merge.kept, merge.added) == ((numbered(0).key(),), (numbered(1).key(),))
    table = load_file(path)
    assert table.gpu.triton == "3.6.0"  # What a measurement recorded of the device stays.
    by_key = {e.key(): e for e in table.entries}
    assert by_key[numbered(0).key()].label == "measured"
    assert table.triton_of(by_key[numbered(1).key()]) == "3.7.0"
    merge = merge_entries(path, header(), [numbered(1)])
    assert merge.replaced == (numbered(1).key(),)
    assert all(e.label == "measured" for e in load_file(path).entries)


def test_older_entries_keep_their_triton_and_date(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "gdn.json"
    merge_entries(path, header(), [numbered(0), numbered(1)])
    merge_entries(path, header(triton="3.7.0", date="2026-05-05"), [numbered(1)])
    table = load_file(path)
    old, new = table.entries
    assert (table.gpu.triton, old.triton, old.date, new.triton, new.date) == (
        "3.7.0",
        "3.6.0",
        "2026-01-02",
        None,
        None,
    )


def test_a_file_of_another_gpu_or_a_broken_file_is_left_alone(tmp_path: Path) -> None:
    path = fakes.write(tmp_path, numbered(0))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not of gdn for h100; choose another --out"):
        merge_entries(path, header(gpu="h100"), [numbered(1)])
    assert path.read_bytes() == before
    path.write_bytes(before[:-20])
    with pytest.raises(TableError, match=r"gdn\.json"):
        merge_entries(path, header(), [numbered(1)])
    assert path.read_bytes() == before[:-20]


def test_a_held_lock_is_a_clear_error(tmp_path: Path) -> None:
    start = time.monotonic()
    with writer_module.locked(tmp_path), pytest.raises(LockTimeout, match="another process"):
        merge_entries(tmp_path / "gdn.json", header(), [numbered(0)], timeout=0.1)
    assert time.monotonic() - start < 5


class _Kernel:
    def __init__(self, name: str, text_hash: str) -> None:
        self.name = name
        self.text_hash = text_hash


def test_an_entry_is_stale_when_its_own_kernel_changed(tmp_path: Path) -> None:
    path = fakes.write(tmp_path, numbered(0), numbered(1))
    fakes.edit(path, lambda d: d["entries"][1]["kernels"][0].update(text_hash="f" * 16))
    table = load_table(path, fakes.variants)
    fresh = [_Kernel("x", "0123456789abcdef")]
    (found,) = stale_entries(table, lambda p, c: fresh)
    assert (found.key, found.reason) == (numbered(1).key(), "the text of x changed")
    found = stale_entries(table, lambda p, c: [*fresh, _Kernel("y", "0" * 16)])[0]
    assert found.reason == "was tuned with 1 kernel, has 2 now"

    def fails(problem: object, config: object) -> list[_Kernel]:
        raise RuntimeError("undefined name")

    assert "does not render: RuntimeError: undefined name" in stale_entries(table, fails)[0].reason


class _Source(_Kernel):
    def __init__(self, name: str, text_hash: str, source: str) -> None:
        super().__init__(name, text_hash)
        self.source = source


def test_kernels_follow_the_tables(tmp_path: Path) -> None:
    name = "gdn_verify_0a1b2c3d"
    kernels = [KernelRef(name=name, text_hash="0" * 16)]
    path = fakes.write(tmp_path, fakes.entry(numbered(0).problem(), kernels=kernels), numbered(1))
    folder = path.parent / "kernels"

    def render(problem: object, config: object) -> list[_Source]:
        return [_Source(name, "0" * 16, "text\n")]

    assert write_kernels(path.parent, render, fakes.variants) == 1
    assert (folder / f"{name}.py").read_text() == "text\n"
    stamp = (folder / f"{name}.py").stat().st_mtime_ns
    (folder / "gdn_verify_ffffffff.py").write_text("old")
    (folder / "mine.py").write_text("kept")
    write_kernels(path.parent, render, fakes.variants)
    assert sorted(f.name for f in folder.iterdir()) == [f"{name}.py", "mine.py"]
    assert (folder / f"{name}.py").stat().st_mtime_ns == stamp
    assert write_kernels(path.parent, lambda p, c: [_Source(name, "1" * 16, "new")], fakes.variants) == 0
    assert sorted(f.name for f in folder.iterdir()) == ["mine.py"]


def test_an_entry_for_flatter_trees_is_kept_only_where_it_is_faster(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "gdn.json"

    def timed(depth: int, us: float, work: int = 32) -> Entry:
        return msgspec.structs.replace(fakes.entry(P.replace(nodes=64, depth=depth, work=work)), median_us=us)

    merge_entries(path, header(), [timed(64, 10.0), timed(32, 9.0), timed(16, 9.5), timed(64, 10.0, 256)])
    merge_entries(path, header(), [timed(16, 10.0, 256)])
    table = load_file(path)
    assert sorted((e.work, e.depth) for e in table.entries) == [(32, 32), (32, 64), (256, 64)]
    merge_entries(path, header(), [timed(16, 8.0), timed(16, 9.9, 256)])
    assert sorted((e.work, e.depth) for e in load_file(path).entries) == [
        (32, 16), (32, 32), (32, 64), (256, 16), (256, 64),
    ]  # fmt: skip


def test_damaged_kernels_are_written_again(tmp_path: Path) -> None:
    name = "gdn_verify_0a1b2c3d"
    path = fakes.write(tmp_path, fakes.entry(kernels=[KernelRef(name=name, text_hash="0" * 16)]))
    place = path.parent / "kernels" / f"{name}.py"

    def render(problem: object, config: object) -> list[_Source]:
        return [_Source(name, "0" * 16, "text\n")]

    write_kernels(path.parent, render, fakes.variants)
    for damage in (b"\xff\xfe", b"", b"te"):
        place.write_bytes(damage)
        write_kernels(path.parent, render, fakes.variants)
        assert place.read_bytes() == b"text\n"
    # A link is kept; what no table names is removed where it is a file.
    place.rename(tmp_path / "elsewhere.py")
    place.symlink_to(tmp_path / "elsewhere.py")
    (tmp_path / "elsewhere.py").write_text("old")
    (place.parent / "gdn_verify_ffffffff.py").mkdir()
    write_kernels(path.parent, render, fakes.variants)
    assert place.is_symlink()
    assert (tmp_path / "elsewhere.py").read_text() == "text\n"
    place.unlink()
    place.mkdir()
    with pytest.raises(OSError, match=r"[Dd]irectory"):
        write_kernels(path.parent, render, fakes.variants)
    assert sorted(p.name for p in place.parent.iterdir()) == [place.name, "gdn_verify_ffffffff.py"]
