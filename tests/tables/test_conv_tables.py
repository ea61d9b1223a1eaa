"""Tables of convolutions: files, lookup, known-bad kernels, keys."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import table_fakes as fakes

from bole_codegen.search.results import Failed
from bole_codegen.tables.conv_keys import CONV_EXAMPLE
from bole_codegen.tables.keys import depth_note, parse_key
from bole_codegen.tables.known_bad import KnownBad
from bole_codegen.tables.provenance import header
from bole_codegen.tables.stale import stale_entries
from bole_codegen.tables.writer import merge_entries
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.space import Config
from bole_runtime.kernels.variants import all_variants, get_variant
from bole_runtime.tables import lookup
from bole_runtime.tables.checks import CheckStore
from bole_runtime.tables.load import dump, load_file, load_table
from bole_runtime.tables.lookup import Dispatcher, TableWarning
from bole_runtime.tables.schema import ConvEntry, KernelRef, new_entry

P = ConvProblem("tree_conv", 8192, 4, 3, "bf16", "bf16", False, True, False, 16, 0, 8)
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def config(bc: int = 128, nb: int = 4, warps: int = 2) -> Config:
    return get_variant("tree_conv", "gather").config({"bc": bc, "nb": nb, "warps": warps})


def entry(problem: ConvProblem = P, chosen: Config | None = None, **changes: Any) -> ConvEntry:
    chosen = chosen or config()
    values: dict[str, Any] = {
        "variant": chosen.variant,
        "params": chosen.as_dict(),
        "timed_channels": problem.channels,
        "median_us": 5.5,
        "spread_us": 0.1,
        "floor_us": 4.0,
        "ratio": 1.375,
        "error": 1e-7,
        "default_us": 6.5,
        "runner_up": None,
        "margin": None,
        "kernels": [KernelRef(name="x", text_hash="0123456789abcdef")],
        "label": "measured",
        "trials": 12,
    }
    made = new_entry(problem, **{**values, **changes})
    assert isinstance(made, ConvEntry)
    return made


def write(root: Path, *entries: ConvEntry, gpu: str = "h200", triton: str = "3.6.0") -> Path:
    path = root / gpu / "conv.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = msgspec.structs.replace(fakes.table(gpu=gpu, triton=triton), family="conv", entries=list(entries))
    path.write_bytes(dump(table))
    return path


def make(root: Path, cache: Path | None = None, **options: Any) -> Dispatcher:
    checks = CheckStore(cache or root / "cache")
    return Dispatcher((root,), **{"user_roots": 1, "gpus": fakes.gpus, "triton": "3.6.0", "checks": checks, **options})


def resolve(dispatcher: Dispatcher, problem: ConvProblem = P, name: str = H200) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = dispatcher.resolve(problem, name, fakes.LIMITS)
    return found, [str(w.message) for w in caught if issubclass(w.category, TableWarning)]


def test_a_table_reads_back_and_is_written_the_same(tmp_path: Path) -> None:
    commit = P.replace(op="conv_commit", silu=False)
    chosen = get_variant("conv_commit", "shift").config({"bc": 256, "warps": 2})
    path = write(tmp_path, entry(), entry(P.replace(work=64)), entry(commit, chosen))
    table = load_table(path, all_variants)
    assert not table.skipped
    assert [e.problem for e in table.entries] == [commit, P, P.replace(work=64)]
    assert table.entries[0].config == chosen
    again = dump(load_file(path))
    assert again == path.read_bytes()
    first = json.loads(again)["entries"][1]
    assert list(first)[:5] == ["op", "channels", "width", "length", "in_dtype"]
    assert first["silu"] is True


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("op", "nosuch", "Invalid enum value 'nosuch'"),
        ("channels", 6144, "channels = 6144 is not a power of two"),
        ("channels", 10**9, "<="),
        ("width", 9, "<= 8"),
        ("length", 2, "too short for a width of 4"),
        ("work", 3, "work = 3 is not a power of two"),
        ("nodes", 17, "nodes = 17"),
        ("bias", 1, "bool"),
        ("family", "gdn", "unknown field `family`"),
        ("variant", "fused", "no variant 'fused'"),
        ("params", {"bc": 100, "nb": 4, "warps": 2}, "bc = 100"),
    ],
)
def test_an_edited_entry_is_skipped_with_its_reason(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = write(tmp_path, entry(), entry(P.replace(work=64)))
    fakes.edit(path, lambda data: data["entries"][0].__setitem__(field, value))
    table = load_table(path, all_variants)
    assert len(table.entries) == 1
    assert message in table.skipped[0][1]


def test_entries_of_another_table_are_not_taken(tmp_path: Path) -> None:
    path = write(tmp_path, entry())
    fakes.edit(path, lambda data: data.__setitem__("family", "gdn"))
    (tmp_path / "h200" / "gdn.json").write_bytes(path.read_bytes())
    assert "family 'conv' in a file of 'gdn'" in load_table(path, all_variants).skipped[0][1]
    found, _ = resolve(make(tmp_path))
    assert found.source == "default"


def test_a_merge_keeps_every_entry_and_measurements(tmp_path: Path) -> None:
    head = header(fakes.table().gpu, "conv", "protocol")
    path = tmp_path / "h200" / "conv.json"
    merge_entries(path, head, [entry(), entry(P.replace(nodes=64), median_us=3.0)])
    merge = merge_entries(path, head, [entry(label="predicted"), entry(P.replace(work=64))])
    assert merge.kept == (P.key(),)
    assert merge.added == (P.replace(work=64).key(),)
    assert len(load_file(path).entries) == 3


def test_lookup_takes_the_exact_gpu_then_a_stand_in_then_the_default(tmp_path: Path) -> None:
    write(tmp_path, entry())
    found, told = resolve(make(tmp_path))
    assert (found.source, found.config, told) == ("h200", config(), [])
    found, told = resolve(make(tmp_path), name=H100)
    assert found.source == "h200"
    assert "the one of h200 stands in" in told[0]
    assert "bole-tune --gpu h100 --ops tree_conv --channels 8192 --width 4 --length 3" in told[0]
    found, told = resolve(make(tmp_path), P.replace(in_dtype="fp16"))
    assert found.source == "default"
    assert "the analytic default is used" in told[0]
    found, _ = resolve(make(tmp_path), name="Some GPU")
    assert found.source == "default"


@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        ({"nodes": 32}, {"nodes": 32}),
        ({"work": 2}, {"work": 4}),
        ({"work": 1024}, {"work": 64}),
        ({"channels": 2048}, {"channels": 4096}),
        ({"channels": 32768}, {"channels": 8192}),
        ({"bias": True}, {"bias": True}),
        ({"bias": True, "length": 4}, {"bias": True}),
        ({"silu": False}, {}),
    ],
)
def test_the_nearest_bucket_stands_in(tmp_path: Path, change: dict[str, Any], nearest: dict[str, Any]) -> None:
    held = [{}, {"nodes": 32}, {"nodes": 64}, {"work": 4}, {"work": 64}, {"channels": 4096}, {"bias": True}]
    write(tmp_path, *(entry(P.replace(**h)) for h in held))
    found, told = resolve(make(tmp_path), P.replace(**change))
    assert found.entry is not None
    assert found.entry.problem == P.replace(**nearest)
    other = {"channels", "bias", "silu", "length"} & {k for k in change if change[k] != nearest.get(k, getattr(P, k))}
    assert bool(told) == bool(other)


@pytest.mark.parametrize(
    "change",
    [{"op": "conv_commit"}, {"width": 3}, {"dynamic": True}, {"state_dtype": "fp32"}, {"nodes": 32}, {"pending": 16}],
)
def test_what_never_stands_in(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, entry())
    found, _ = resolve(make(tmp_path), P.replace(**change))
    assert found.source == "default"


def test_an_entry_that_cannot_run_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, entry(P, config(bc=1024, nb=1, warps=4)))
    found, told = resolve(make(tmp_path), P.replace(channels=256))
    assert found.source == "default"
    assert "cannot run here (bc=1024 is wider than 256 channels)" in told[0]


def test_a_prediction_and_another_triton_wait_for_a_check(tmp_path: Path) -> None:
    for changes, triton in (({"label": "predicted"}, "3.6.0"), ({}, "3.5.0")):
        root = tmp_path / triton
        write(root, entry(**changes), triton=triton)
        tables = make(root)
        found, told = resolve(tables)
        assert found.source == "default"
        assert "used once warmup() has checked it here" in told[0]
        (waiting,) = tables.unchecked(P, H200, fakes.LIMITS)
        tables.mark_checked(waiting, H200)
        assert resolve(tables)[0].config == config()


def test_a_known_bad_kernel_is_chosen_for_no_number_of_channels_or_nodes(tmp_path: Path) -> None:
    from bole_codegen.render import render

    write(tmp_path, entry())
    bad = KnownBad((tmp_path,), "h200", "3.6.0")
    texts = [k.text_hash for k in render(P, config())]
    bad.add(P.replace(nodes=64, work=1), config(), texts, Failed("wrong", "x"))
    # One of a recurrence in the same list.
    bad.add(fakes.PROBLEM, Config("fused", (("BV", 16),)), ["0123456789abcdef"], Failed("hang", "y"))
    path = bad.save()
    assert path is not None
    again = KnownBad((tmp_path,), "h200", "3.6.0")
    assert again.find(P, config(), texts) is not None
    assert again.find(P.replace(bias=True), config(), texts) is None
    assert again.find(fakes.PROBLEM, Config("fused", (("BV", 16),)), ["0123456789abcdef"]) is not None
    found, told = resolve(make(tmp_path))
    assert found.source == "default"
    assert "is on the list of kernels that failed here (wrong)" in told[0]
    again.clear(P, config())
    again.save()
    assert resolve(make(tmp_path))[0].config == config()


def test_stale_entries_are_named(tmp_path: Path) -> None:
    from bole_codegen.render import render

    real = [KernelRef(name=k.name, text_hash=k.text_hash) for k in render(P, config())]
    path = write(tmp_path, entry(kernels=real), entry(P.replace(work=64)))
    (stale,) = stale_entries(load_table(path, all_variants))
    assert stale.key == P.replace(work=64).key()


@pytest.mark.parametrize("change", [{}, {"bias": True, "dynamic": True}, {"silu": False, "pending": 16}])
def test_a_key_and_a_name_name_the_bucket(change: dict[str, Any]) -> None:
    from bole_codegen.report.summary import bucket_name

    problem = P.replace(**change)
    assert parse_key(problem.key()) == problem
    assert parse_key(bucket_name(entry(problem))) == problem
    assert depth_note(problem.key(), problem, [problem]) is None
    assert parse_key(problem.key().replace("c8192", "c6144").replace("n16", "n9")) == problem


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("tree_conv/nonsense", f"one reads {CONV_EXAMPLE}"),
        (CONV_EXAMPLE.replace("bf16", "int8"), "in_dtype 'int8' is not one of"),
        (CONV_EXAMPLE.replace("silu", "gelu"), "'gelu' is not one of plain, bias, silu, dynamic"),
        (CONV_EXAMPLE.replace("w4-l3", "w9-l9"), "width = 9 is not allowed; allowed: 2 to 8"),
        (CONV_EXAMPLE.replace("l3", "l2"), "length = 2 is not allowed; allowed: 3 to 16"),
        (CONV_EXAMPLE.replace("tree_conv", "conv_commit"), "its key reads plain"),
    ],
)
def test_a_wrong_key_says_what_is_wrong(key: str, words: str) -> None:
    with pytest.raises(ValueError, match="conv") as caught:
        parse_key(key)
    assert words in str(caught.value)


def test_a_call_takes_its_configuration_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_codegen.render import render
    from bole_runtime.backends.triton_backend import select

    real = [KernelRef(name=k.name, text_hash=k.text_hash) for k in render(P, config())]
    write(tmp_path, entry(kernels=real))
    tables = make(tmp_path)
    monkeypatch.setattr(lookup, "dispatcher", lambda: tables)
    monkeypatch.setattr(select, "limits_of", lambda index: (H200, fakes.LIMITS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Not even a stale one for other channels, nodes and requests.
        chosen, kernels = select._tuned.__wrapped__(P.replace(work=2), 0)
        assert select._tuned.__wrapped__(P.replace(work=64), 0)[0] == config()
    assert chosen == config()
    assert [k.name for k in kernels] == [k.name for k in real]


@pytest.mark.parametrize("right", [True, False])
def test_warming_checks_an_entry_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    import torch

    from bole_runtime.backends.triton_backend import select
    from bole_runtime.conv import warming

    write(tmp_path, entry(label="predicted"))
    tables, checked = make(tmp_path), []
    monkeypatch.setattr(lookup, "dispatcher", lambda: tables)
    monkeypatch.setattr(select, "limits_of", lambda index: (H200, fakes.LIMITS))
    monkeypatch.setattr(select, "choose", lambda problem, device, variant: (resolve(tables, problem)[0].config, ()))

    def check(chosen: Config) -> float:
        checked.append(chosen)
        if not right:
            raise RuntimeError("planted")
        return 0.0

    found = warming._choice(P, torch.device("cuda", 0), check)
    assert checked == [config()]
    assert (found == config()) == right
