"""Order of fallbacks, warnings, trust and memory of the dispatcher."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import table_fakes as fakes

from bole_runtime.kernels.problem import work_bucket
from bole_runtime.tables.checks import CheckStore
from bole_runtime.tables.command import geometry
from bole_runtime.tables.kinds import tune_command
from bole_runtime.tables.lookup import Dispatcher, TableWarning

P = fakes.PROBLEM
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def make(tmp_path: Path, *roots: Path, **changes: Any) -> Dispatcher:
    options: dict[str, Any] = {
        "variants": fakes.variants,
        "gpus": fakes.gpus,
        "default": fakes._default,
        "triton": "3.6.1",
        "checks": CheckStore(tmp_path / "cache"),
    }
    return Dispatcher(roots or (tmp_path,), **{**options, **changes})


def quiet(dispatcher: Dispatcher, problem: Any, device: str = H200) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return dispatcher.resolve(problem, device, fakes.LIMITS)


def bv(value: int) -> dict[str, Any]:
    return {"BV": value, "STAGES": 1, "MODE": "rhs"}


@pytest.fixture(autouse=True)
def every_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def test_exact_bucket(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P, bv(64)), fakes.entry(P.replace(work=64), bv(128)))
    dispatcher = make(tmp_path)
    found = quiet(dispatcher, P)
    assert (found.source, found.config["BV"], found.entry.key) == ("h200", 64, P.key())
    assert dispatcher.resolve(P, H200, fakes.LIMITS) is found


def test_buckets_go_upward_and_work_to_the_largest(tmp_path: Path) -> None:
    fakes.write(
        tmp_path,
        fakes.entry(P.replace(work=64), bv(16)),
        fakes.entry(P.replace(work=256), bv(32)),
        fakes.entry(P.replace(work=64, nodes=64, depth=64, pending=16), bv(128)),
    )
    dispatcher = make(tmp_path)
    assert quiet(dispatcher, P.replace(work=128, depth=8)).config["BV"] == 32
    assert quiet(dispatcher, P.replace(work=8192)).config["BV"] == 32
    assert quiet(dispatcher, P.replace(work=1)).config["BV"] == 16
    assert quiet(dispatcher, P.replace(nodes=32, depth=32)).config["BV"] == 128
    assert quiet(dispatcher, P.replace(pending=16)).config["BV"] == 128
    with pytest.warns(TableWarning, match="no table has an entry"):
        assert dispatcher.resolve(P.replace(pending=32), H200, fakes.LIMITS).source == "default"


def test_an_entry_for_deeper_trees_goes_before_one_for_another_batch(tmp_path: Path) -> None:
    fakes.write(
        tmp_path,
        fakes.entry(P.replace(nodes=32, depth=16, work=32), bv(16)),
        fakes.entry(P.replace(nodes=32, depth=32, work=2048), bv(64)),
        fakes.entry(P.replace(nodes=32, depth=16, work=8192), bv(128)),
    )
    dispatcher = make(tmp_path)
    for work, wanted in ((2048, 64), (32, 16), (8192, 128), (4096, 128), (1024, 64)):
        assert quiet(dispatcher, P.replace(nodes=32, depth=16, work=work)).config["BV"] == wanted, work


@pytest.mark.parametrize(
    "change",
    [
        {"dk": 64},
        {"dv": 256},
        {"in_dtype": "fp16"},
        {"state_dtype": "bf16"},
        {"precision": "lossless"},
        {"nodes": 32},
        {"depth": 64},
    ],
)
def test_what_never_substitutes_takes_the_default_and_says_how_to_fill_the_gap(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    fakes.write(tmp_path, fakes.entry(P, bv(128)))
    dispatcher = make(tmp_path)
    problem = P.replace(**change)
    with pytest.warns(TableWarning) as caught:
        found = dispatcher.resolve(problem, H200, fakes.LIMITS)
    assert (found.source, found.entry) == ("default", None)
    assert f"`{tune_command(problem, 'h200')}`" in str(caught[0].message)
    quiet(dispatcher, problem.replace(work=2048))  # The second fallback of a kind is silent.


def test_group_and_gate_mode_substitute_at_equal_work_after_the_exact_ones(tmp_path: Path) -> None:
    fakes.write(tmp_path, *(fakes.entry(P.replace(work=w), bv(b)) for w, b in ((32, 16), (64, 32), (128, 64))))
    dispatcher = make(tmp_path)
    with pytest.warns(TableWarning, match="HV/HK = 2"):
        assert dispatcher.resolve(P.replace(group=3, work=64), H200, fakes.LIMITS).config["BV"] == 32
    with pytest.warns(TableWarning, match="'raw' gates"):
        assert dispatcher.resolve(P.replace(gate_mode="ready"), H200, fakes.LIMITS).config["BV"] == 16
    fakes.write(tmp_path, fakes.entry(P.replace(group=3), bv(128)), fakes.entry(P, bv(16)))
    dispatcher = make(tmp_path)
    assert quiet(dispatcher, P.replace(group=3)).config["BV"] == 128


def test_an_alias_stands_in_and_says_so_once(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P, bv(64)), fakes.entry(P.replace(nodes=64, depth=64), bv(128)))
    dispatcher = make(tmp_path)
    with pytest.warns(TableWarning, match="the one of h200 stands in; run `bole-tune --gpu h100") as caught:
        found = dispatcher.resolve(P, H100, fakes.LIMITS)
    assert (found.source, len(caught)) == ("h200", 1)
    assert quiet(dispatcher, P.replace(nodes=64), H100).config["BV"] == 128
    fakes.write(tmp_path, fakes.entry(P, bv(16)), gpu="h100")
    dispatcher = make(tmp_path)
    found = quiet(dispatcher, P, H100)
    assert (found.source, found.config["BV"]) == ("h100", 16)


def test_a_predicted_entry_waits_for_a_check_and_comes_after_a_measured_stand_in(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P, bv(64)))
    fakes.write(tmp_path, fakes.entry(P, bv(16), label="predicted"), gpu="h100")
    with pytest.warns(TableWarning):
        assert make(tmp_path).resolve(P, H100, fakes.LIMITS).source == "h200"
    user = make(tmp_path, user_roots=1)
    with pytest.warns(TableWarning, match="was predicted without a GPU"):
        assert user.resolve(P, H100, fakes.LIMITS).source == "h200"
    (waiting,) = user.unchecked(P, H100, fakes.LIMITS)
    user.mark_checked(waiting, H100)
    assert user.resolve(P, H100, fakes.LIMITS).config["BV"] == 16


@pytest.mark.parametrize("name", ["NVIDIA H200 X", "NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 1g.18gb", "nvidia h200"])
def test_no_substring_match_on_device_names(tmp_path: Path, name: str) -> None:
    fakes.write(tmp_path, fakes.entry(P))
    with pytest.warns(TableWarning, match="the analytic default is used"):
        assert make(tmp_path).resolve(P, name, fakes.LIMITS).source == "default"


def test_without_a_gpu_the_default_is_taken_silently(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P))
    assert quiet(make(tmp_path), P, "cpu").source == "default"


def test_an_entry_that_cannot_run_here_is_passed_over(tmp_path: Path) -> None:
    big = {"BV": 256, "STAGES": 3, "MODE": "rhs"}
    fakes.write(tmp_path, fakes.entry(P, big), fakes.entry(P.replace(work=64), bv(64)))
    with pytest.warns(TableWarning, match="cannot run here"):
        assert make(tmp_path).resolve(P, H200, fakes.LIMITS).config["BV"] == 64


def test_the_users_tables_come_first_but_a_nearer_bucket_wins(tmp_path: Path) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    fakes.write(own, fakes.entry(P, bv(16)))
    fakes.write(shipped, fakes.entry(P, bv(32)), fakes.entry(P.replace(work=512), bv(64)))
    dispatcher = make(tmp_path, own, shipped, user_roots=1)
    assert quiet(dispatcher, P).config["BV"] == 16
    assert quiet(dispatcher, P.replace(work=512)).config["BV"] == 64


def test_the_environment_puts_a_users_tables_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.write(tmp_path, fakes.entry(P, bv(16)))
    monkeypatch.setenv("BOLE_TUNED_DIR", str(tmp_path))
    # The variants here are not those of the package's tables.
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bole_tuned" else find(name))
    dispatcher = Dispatcher(variants=fakes.variants, gpus=fakes.gpus, default=fakes._default, triton="3.6.0")
    assert quiet(dispatcher, P).config["BV"] == 16


@pytest.mark.parametrize("fault", ["is no folder", "holds no <gpu>/<family>.json"])
def test_an_environment_that_names_no_tables_warns_once(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    if "holds" in fault:
        own.mkdir()
    monkeypatch.setenv("BOLE_TUNED_DIR", str(own))
    dispatcher = Dispatcher(checks=CheckStore(tmp_path / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for work in (32, 64, 256):
            dispatcher.resolve(P.replace(work=work), H200, fakes.LIMITS)
    said = [str(w.message) for w in caught if w.category is TableWarning and "BOLE_TUNED_DIR" in str(w.message)]
    assert said == [f"bole: BOLE_TUNED_DIR={own} {fault}; only the tables of the package are used"]
    # Folders that are given are not of the environment; nor is one that holds a list of failed kernels only silent.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*BOLE_TUNED_DIR")
        make(tmp_path).resolve(P, H200, fakes.LIMITS)
        (own / "h200" / "known-bad").mkdir(parents=True)
        (own / "h200" / "known-bad" / "triton-0.0.0.json").touch()
        Dispatcher(checks=CheckStore(tmp_path / "cache")).resolve(P, H200, fakes.LIMITS)


def test_a_broken_file_warns_once_and_the_rest_serves(tmp_path: Path) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    fakes.edit(fakes.write(own, fakes.entry(P, bv(16))), lambda d: d.update(date=3))
    fakes.write(shipped, fakes.entry(P, bv(32)))
    dispatcher = make(tmp_path, own, shipped, user_roots=1)
    with pytest.warns(TableWarning, match=r"gdn\.json: date: Expected `str`") as caught:
        assert dispatcher.resolve(P, H200, fakes.LIMITS).config["BV"] == 32
    assert len(caught) == 1
    fakes.edit(fakes.write(own, fakes.entry(P, bv(16))), lambda d: d["gpu"].update(key="h100"))
    with pytest.warns(TableWarning, match="was made for 'h100'"):
        make(tmp_path, own, shipped, user_roots=1).resolve(P, H200, fakes.LIMITS)


def test_another_triton_minor_version_needs_a_check_here(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P, bv(64)), triton="3.5.1")
    dispatcher = make(tmp_path)
    with pytest.warns(TableWarning, match=r"written under Triton 3\.5\.1, this is 3\.6\.1"):
        assert dispatcher.resolve(P, H200, fakes.LIMITS).source == "default"
    (waiting,) = dispatcher.unchecked(P, H200, fakes.LIMITS)
    assert not dispatcher.is_trusted(waiting, H200)
    dispatcher.mark_checked(waiting, H200)
    assert dispatcher.is_trusted(waiting, H200)
    assert not dispatcher.is_trusted(waiting, H100)  # The check was made on one device.
    assert dispatcher.unchecked(P, H200, fakes.LIMITS) == ()
    assert dispatcher.resolve(P, H200, fakes.LIMITS).config["BV"] == 64
    assert quiet(make(tmp_path), P).config["BV"] == 64  # Remembered by the next process...
    with pytest.warns(TableWarning):  # ... but for this Triton only.
        assert make(tmp_path, triton="3.7.0").resolve(P, H200, fakes.LIMITS).source == "default"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": 1, "checked": [3]}', b"\x00" * 64])
def test_a_damaged_record_of_checks_counts_as_empty(tmp_path: Path, damage: bytes) -> None:
    store = CheckStore(tmp_path)
    store.path.write_bytes(damage)
    assert not store.has("0" * 64)
    store.add("0" * 64)
    assert CheckStore(tmp_path).has("0" * 64)


def test_a_record_of_checks_that_others_can_write_is_ignored(tmp_path: Path) -> None:
    CheckStore(tmp_path).add("0" * 64)
    path = CheckStore(tmp_path).path
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    assert not CheckStore(tmp_path).has("0" * 64)


def test_the_command_falls_into_the_bucket() -> None:
    for group in (1, 2, 3, 4, 8):
        for work in (8, 32, 64, 256, 8192):
            problem = P.replace(group=group, work=work)
            hk, hv, batch = geometry(problem)
            assert hv == hk * group
            assert work_bucket(batch, hv) == work


def test_msgspec_is_not_imported_before_a_table_is_read() -> None:
    code = "import sys, bole_runtime.tables.lookup as l; l.dispatcher(); assert 'msgspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
