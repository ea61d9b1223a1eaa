"""Lists of kernels that failed: written by the search, respected by it and by dispatch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import search_fakes
import table_fakes as fakes

from bole_codegen.search.results import Failed
from bole_codegen.tables.known_bad import KnownBad
from bole_runtime.kernels.space import Config
from bole_runtime.tables.bad import bad_path, load_bad
from bole_runtime.tables.checks import CheckStore
from bole_runtime.tables.lookup import Dispatcher, TableWarning

P = fakes.PROBLEM
TEXTS = ("0123456789abcdef",)


def config(bv: int) -> Config:
    return fakes.FUSED.config({"BV": bv, "STAGES": 1, "MODE": "rhs"})


def listed(root: Path, *bad: Config, triton: str = "3.6.1", problem: Any = P, kind: str = "wrong") -> Path:
    found = KnownBad([root], "h200", triton)
    for one in bad:
        found.add(problem, one, TEXTS, Failed(kind, "off by 0.6\nand more"))
    path = found.save()
    assert path is not None
    return path


def test_what_failed_is_found_again_for_the_same_text_only(tmp_path: Path) -> None:
    path = listed(tmp_path, config(32), config(64))
    assert path == tmp_path / "h200" / "known-bad" / "triton-3.6.1.json"
    known = KnownBad([tmp_path], "h200", "3.6.1")
    for work in (1, 32, 4096):  # Work and depth do not change kernels.
        found = known.find(P.replace(work=work), config(32), TEXTS)
        assert found is not None
        assert found.kind == "wrong"
        assert found.message.endswith(": off by 0.6 and more")
    assert known.find(P, config(32), ("f" * 16,)) is None
    assert known.find(P, config(128), TEXTS) is None
    assert known.find(P.replace(precision="lossless"), config(32), TEXTS) is None
    assert KnownBad([tmp_path], "h200", "3.7.0").find(P, config(32), TEXTS) is None
    assert KnownBad([tmp_path], "h200", "3.6.1", fresh=True).find(P, config(32), TEXTS) is None


def test_a_changed_kernel_that_fails_too_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = listed(tmp_path, config(32), config(64))
    new = ("f" * 16,)
    later = KnownBad([tmp_path], "h200", "3.6.1")
    later.add(P, config(32), new, Failed("hang", "the new text hangs"))
    assert later.added == 1
    assert later.save() == path
    data = load_bad(path)
    assert data is not None
    assert [(e.params["BV"], e.kernels, e.kind) for e in data.entries] == [
        (32, list(new), "hang"),
        (64, list(TEXTS), "wrong"),
    ]
    again = KnownBad([tmp_path], "h200", "3.6.1")
    assert again.find(P, config(32), new) is not None
    assert again.find(P, config(32), TEXTS) is None
    # The same text is known: the day it was first seen stays.
    again.add(P, config(32), new, Failed("wrong", "later"))
    assert (again.added, again.save()) == (0, None)


def test_an_old_text_in_one_folder_hides_no_new_one_in_another(tmp_path: Path) -> None:
    listed(tmp_path / "shipped", config(32))
    mine = KnownBad([tmp_path / "mine"], "h200", "3.6.1")
    mine.add(P, config(32), ("f" * 16,), Failed("hang", "x"))
    mine.save()
    both = KnownBad([tmp_path / "mine", tmp_path / "shipped"], "h200", "3.6.1")
    assert [getattr(both.find(P, config(32), t), "kind", None) for t in (TEXTS, ("f" * 16,))] == ["wrong", "hang"]


def test_lists_merge_and_what_passes_is_taken_off(tmp_path: Path) -> None:
    listed(tmp_path, config(32))
    path = listed(tmp_path, config(64))
    before = path.read_bytes()
    listed_file = load_bad(path)
    assert listed_file is not None
    assert [e.params["BV"] for e in listed_file.entries] == [32, 64]
    again = KnownBad([tmp_path], "h200", "3.6.1")
    assert again.save() is None
    assert path.read_bytes() == before
    again.clear(P, config(32))
    again.save()
    left = load_bad(path)
    assert left is not None
    assert [e.params["BV"] for e in left.entries] == [64]


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"schema_version": 1, "gpu": "h200", "triton": "3.6.1", "entries": [{}]}']
)
def test_a_damaged_list_is_named_and_not_used(tmp_path: Path, text: str) -> None:
    path = bad_path(tmp_path, "h200", "3.6.1")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"known-bad list .*triton-3\.6\.1\.json"):
        load_bad(path)
    with pytest.warns(TableWarning, match=r"known-bad list .* it is not used"):
        found = dispatcher(tmp_path).resolve(P, "NVIDIA H200", fakes.LIMITS)
    assert found.config == fakes._default(P, fakes.LIMITS)


def test_names_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    for gpu, triton in (("../x", "3.6.1"), ("h200", "../../etc"), ("h200", "")):
        with pytest.raises(ValueError, match="no plain name"):
            bad_path(tmp_path, gpu, triton)


def dispatcher(root: Path, **changes: Any) -> Dispatcher:
    options: dict[str, Any] = {
        "variants": fakes.variants,
        "gpus": fakes.gpus,
        "default": fakes._default,
        "triton": "3.6.1",
        "checks": CheckStore(root / "cache"),
    }
    return Dispatcher((root,), **{**options, **changes})


@pytest.mark.filterwarnings("ignore::bole_runtime.tables.lookup.TableWarning")
def test_dispatch_passes_over_a_listed_entry(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P), fakes.entry(P.replace(work=64), {"BV": 128, "STAGES": 1, "MODE": "rhs"}))
    assert dispatcher(tmp_path).resolve(P, "NVIDIA H200", fakes.LIMITS).config["BV"] == 64
    listed(tmp_path, config(64))
    found = dispatcher(tmp_path)
    assert found.resolve(P, "NVIDIA H200", fakes.LIMITS).config["BV"] == 128
    assert found.unchecked(P, "NVIDIA H200", fakes.LIMITS) == ()
    # Another Triton or another GPU has a list of its own.
    assert dispatcher(tmp_path, triton="3.6.0").resolve(P, "NVIDIA H200", fakes.LIMITS).config["BV"] == 64


def _kernels(*hashes: str) -> Any:
    """Return what tells a dispatcher the names of kernels of these texts, and what it was asked."""
    asked: list[tuple[str, ...]] = []

    def names(problem: Any, config: Config, named: tuple[str, ...]) -> tuple[str, ...]:
        asked.append(named)
        return tuple(f"gdn_verify_{h[:8]}" for h in hashes)

    return {"kernels": names}, asked


@pytest.mark.filterwarnings("ignore::bole_runtime.tables.lookup.TableWarning")
def test_an_entry_of_another_text_blocks_neither_an_entry_nor_the_default(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P), fakes.entry(P.replace(work=64), {"BV": 128, "STAGES": 1, "MODE": "rhs"}))
    listed(tmp_path, config(64), fakes._default(P, fakes.LIMITS))
    same, asked = _kernels(*TEXTS)
    assert dispatcher(tmp_path, **same).resolve(P, "NVIDIA H200", fakes.LIMITS).config["BV"] == 128
    # The kernels that the entry names, which the package may ship; and only where there is something to compare.
    assert asked == [("x",)]
    for texts in (("f" * 16,), (*TEXTS, *TEXTS), ()):
        other, _ = _kernels(*texts)
        found = dispatcher(tmp_path, **other)
        assert found.resolve(P, "NVIDIA H200", fakes.LIMITS).config["BV"] == 64
    bare = tmp_path / "bare"
    listed(bare, fakes._default(P, fakes.LIMITS))
    (quiet, _), (loud, _) = _kernels("f" * 16), _kernels(*TEXTS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dispatcher(bare, **quiet).resolve(P, "NVIDIA H200", fakes.LIMITS)
        assert not [w for w in caught if "known to fail" in str(w.message)]
        dispatcher(bare, **loud).resolve(P, "NVIDIA H200", fakes.LIMITS)
        assert [w for w in caught if "known to fail" in str(w.message)]


@pytest.mark.filterwarnings("ignore::bole_runtime.tables.lookup.TableWarning")
def test_an_old_text_in_one_folder_hides_no_entry_of_the_new_one_from_dispatch(tmp_path: Path) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    fakes.write(own, fakes.entry(P))
    listed(own, config(64))
    later = KnownBad([shipped], "h200", "3.6.1")
    later.add(P, config(64), ("f" * 16,), Failed("hang", "x"))
    later.save()
    for texts in (TEXTS, ("f" * 16,)):
        options, _ = _kernels(*texts)
        found = Dispatcher(
            (own, shipped), user_roots=1, variants=fakes.variants, gpus=fakes.gpus, default=fakes._default,
            triton="3.6.1", checks=CheckStore(tmp_path / "cache"), **options,
        )  # fmt: skip
        assert found.resolve(P, "NVIDIA H200", fakes.LIMITS).source == "default"


@pytest.mark.filterwarnings("ignore::bole_runtime.tables.lookup.TableWarning")
def test_where_nobody_can_tell_the_text_a_list_is_obeyed(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(P))
    listed(tmp_path, config(64))
    unknown = {"kernels": lambda problem, config, named: None}
    assert dispatcher(tmp_path, **unknown).resolve(P, "NVIDIA H200", fakes.LIMITS).source == "default"
    # So is an entry that says nothing of texts.
    path = bad_path(tmp_path, "h200", "3.6.1")
    fakes.edit(path, lambda data: data["entries"][0].update(kernels=[]))
    other, _ = _kernels("f" * 16)
    assert dispatcher(tmp_path, **other).resolve(P, "NVIDIA H200", fakes.LIMITS).source == "default"


# What a key does not say of a call shapes its text too: it is the usual text that is compared.
@pytest.mark.parametrize("changes", [{}, {"work": 4096}, {"gate_dtypes": ("fp32", "bf16")}, {"qk_l2norm": False}])
def test_texts_of_real_kernels_are_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    from bole_codegen.render import render
    from bole_runtime import gpus
    from bole_runtime.kernels.default import default_config

    limits = gpus.get("h200").limits()
    problem = P.replace(op="commit", gate_mode="ready")
    chosen = default_config(problem.replace(**changes), limits)
    texts = tuple(k.text_hash for k in render(problem, chosen))
    for place, hashes in (("now", texts), ("before", tuple("0" * 16 for _ in texts))):
        known = KnownBad([tmp_path / place], "h200", "3.6.1")
        known.add(problem, chosen, hashes, Failed("wrong", "off"))
        known.save()
        tables = Dispatcher((tmp_path / place,), triton="3.6.1", checks=CheckStore(tmp_path / "cache"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tables.resolve(problem.replace(**changes), "NVIDIA H200", limits)
        assert any("known to fail on h200" in str(w.message) for w in caught) == (place == "now")


def test_the_default_gives_way_to_another_variant(tmp_path: Path) -> None:
    other = fakes.Variant(**{**vars(fakes.FUSED), "name": "other"})
    two = {"variants": lambda op: (fakes.FUSED, fakes.Variant(**{**vars(other), "default": lambda p, g: OTHER}))}
    OTHER = Config("other", fakes._default(P, fakes.LIMITS).params)
    listed(tmp_path, fakes._default(P, fakes.LIMITS), kind="illegal")
    with pytest.warns(TableWarning, match=r"the default fused\(.*known to fail on h200 \(illegal\); other\("):
        found = dispatcher(tmp_path, **two).resolve(P, "NVIDIA H200", fakes.LIMITS)
    assert found.config == OTHER
    with pytest.warns(TableWarning, match="and so are the others"):
        alone = dispatcher(tmp_path).resolve(P, "NVIDIA H200", fakes.LIMITS)
    assert alone.config == fakes._default(P, fakes.LIMITS)


def test_the_search_does_not_run_what_is_listed_and_lists_what_fails(tmp_path: Path) -> None:
    first, _ = search_fakes.make(
        tmp_path / "a", plant={"screen 64": "wrong", "check 128": "nan", "quick 16": "illegal"}
    )
    object.__setattr__(first._env, "known_bad", KnownBad([tmp_path], "h200", "3.6.1"))
    first.run(search_fakes.targets((1,)))
    data = json.loads((tmp_path / "h200" / "known-bad" / "triton-3.6.1.json").read_text())
    kinds = {(e["params"]["BV"], e["kind"]) for e in data["entries"]}
    assert kinds >= {(64, "wrong"), (16, "illegal")}
    second, saved = search_fakes.make(tmp_path / "b")
    object.__setattr__(second._env, "known_bad", KnownBad([tmp_path], "h200", "3.6.1"))
    result = second.run(search_fakes.targets((1,)))
    assert not [c for c in search_fakes.calls(tmp_path / "b") if "BV=64" in c]
    assert saved[0].params["BV"] != 64
    assert result.failures["wrong"] == 3
    third, saved = search_fakes.make(tmp_path / "c")
    object.__setattr__(third._env, "known_bad", KnownBad([tmp_path], "h200", "3.6.1", fresh=True))
    third.run(search_fakes.targets((1,)))
    assert saved[0].params["BV"] == 64


def test_a_list_of_another_version_is_not_looked_into(tmp_path: Path) -> None:
    path = bad_path(tmp_path, "h200", "3.6.1")
    path.parent.mkdir(parents=True)
    path.write_text('{"schema_version": 999, "later": true}')
    assert load_bad(path) is None
