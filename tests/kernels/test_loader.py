"""Where kernels come from: shipped files that were made for the configuration, else the private cache."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bole_codegen.render import render
from bole_runtime.kernels import loader
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, Variant
from bole_runtime.kernels.text import kernel_hash, template_hash
from bole_runtime.kernels.variants import all_variants, get_variant

PROBLEM = Problem("verify", "gdn", 16, 32, 1, "fp32", "fp32", "ready", "lossless", 16, 16, 0, 1)


def config(**changes: object) -> Config:
    values = {
        "orient": "nodes",
        "bv": 16,
        "state_dot": "tf32x3",
        "mix": "tf32x3",
        "solve": "tf32x3",
        "warps": 1,
        "prefetch": True,
        "stack": False,
    }
    return get_variant("verify", "fused").config({**values, **changes})


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Kernels of two configurations as if the package shipped them, and an empty cache."""
    files = {}
    (tmp_path / "shipped").mkdir()
    for made in (config(), config(bv=32)):
        (kernel,) = render(PROBLEM, made)
        files[kernel.name] = tmp_path / "shipped" / f"{kernel.name}.py"
        files[kernel.name].write_text(kernel.source)
    monkeypatch.setattr(loader, "_shipped", lambda: files)
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    loader._load.cache_clear()
    yield files
    loader._load.cache_clear()


def test_a_shipped_kernel_is_taken(shipped: dict[str, Path], tmp_path: Path) -> None:
    name = render(PROBLEM, config())[0].name
    (kernel,) = loader.load(PROBLEM, config(), (name,))
    assert kernel.name == name
    assert Path(kernel.function.fn.__code__.co_filename) == shipped[name]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("changes", [{"bv": 32}, {"warps": 2}, {"prefetch": False}, {"stack": True}])
def test_a_shipped_kernel_of_another_configuration_is_not(shipped: dict[str, Path], changes: dict[str, object]) -> None:
    # The grid and the scratch of one configuration with the tiles of another would read and write elsewhere.
    name = render(PROBLEM, config())[0].name
    (kernel,) = loader.load(PROBLEM, config(**changes), (name,))
    assert kernel.name == render(PROBLEM, config(**changes))[0].name != name


@pytest.mark.parametrize(
    "edit", [("tl.program_id(0)", "tl.program_id(0) + 0"), ("    return", "    print()\n    return")]
)
def test_a_shipped_kernel_that_was_edited_is_not(shipped: dict[str, Path], edit: tuple[str, str]) -> None:
    (rendered,) = render(PROBLEM, config())
    text = shipped[rendered.name].read_text()
    assert edit[0] in text
    shipped[rendered.name].write_text(text.replace(*edit, 1))
    (kernel,) = loader.load(PROBLEM, config(), (rendered.name,))
    assert kernel.name == rendered.name
    assert Path(kernel.function.fn.__code__.co_filename) != shipped[rendered.name]


def test_a_shipped_kernel_of_older_templates_is_taken_only_if_they_still_make_it(
    shipped: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (rendered,) = render(PROBLEM, config())
    path = shipped[rendered.name]
    older = path.read_text().replace(f"# template hash: {template_hash()}", "# template hash: 0123456789ab")
    path.write_text(older)
    (kernel,) = loader.load(PROBLEM, config(), (rendered.name,))
    assert Path(kernel.function.fn.__code__.co_filename) == path
    # The same kernel as older templates made it: right for its name, and not what they make now.
    text = older.replace("tl.program_id(0)", "tl.program_id(0) + 0", 1)
    name = f"{rendered.plan.stem}_{kernel_hash(text, rendered.name, rendered.plan.options)[:8]}"
    shipped[name] = path.with_stem(name)
    shipped[name].write_text(text.replace(rendered.name, name))
    loader._load.cache_clear()
    (kernel,) = loader.load(PROBLEM, config(), (name,))
    assert kernel.name == rendered.name
    # Where nothing can be rendered, it is all there is.
    loader._load.cache_clear()
    monkeypatch.setitem(sys.modules, "bole_codegen.render", None)
    (kernel,) = loader.load(PROBLEM, config(), (name,))
    assert kernel.name == name


def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"kernels cannot be kept in .*file/kernels: .*set BOLE_CACHE_DIR"):
        loader.import_kernel("some_kernel", "")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loader.tempfile, "mkstemp", full)
    with pytest.raises(RuntimeError, match=r"No space left on device; set BOLE_CACHE_DIR"):
        loader.import_kernel("some_kernel", "")


def test_a_cache_that_others_can_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(RuntimeError, match="another user can write to it"):
        loader.import_kernel("some_kernel", "")


@pytest.mark.parametrize("variant", [v for op in ("verify", "commit") for v in all_variants(op)], ids=lambda v: v.name)
def test_headers_tell_the_configuration(variant: Variant, tmp_path: Path) -> None:
    problem = PROBLEM.replace(op=variant.op, nodes=32, pending=16, in_dtype="bf16", precision="fast", group=2)
    limits = GpuLimits((9, 0), 132, 232448, 60 << 20, 4800.0)
    for made in itertools.islice(variant.enumerate(problem, limits), 0, None, 97):
        for kernel in render(problem, made):
            path = tmp_path / f"{kernel.name}.py"
            path.write_text(kernel.source)
            assert loader._is_of(path, kernel.plan)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.py")


DAMAGES = {
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "no text within": lambda path: path.write_bytes(path.read_bytes().replace(b"return", b"retur\xff")),
    "missing": Path.unlink,
    "a folder": _folder,
    "a link to nothing": _link_to_nothing,
    "edited": lambda path: path.write_text("import os\n" + path.read_text()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shipped_kernel_is_named_once_and_rendered_anew(
    damage: Callable[[Path], object], shipped: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rendered,) = render(PROBLEM, config())
    path = shipped[rendered.name]
    damage(path)
    with pytest.warns(loader.KernelWarning) as caught:
        (kernel,) = loader.load(PROBLEM, config(), (rendered.name,))
    (warning,) = caught
    assert str(warning.message).startswith(f"bole: the shipped kernel {path} is ")
    assert "rendered anew" in str(warning.message)
    assert Path(kernel.function.fn.__code__.co_filename).parent == tmp_path / "cache" / "kernels"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.names_of(PROBLEM, config(), (rendered.name,)) == (rendered.name,)
    # Where nothing can be rendered, the error says so.
    loader._load.cache_clear()
    monkeypatch.setitem(sys.modules, "bole_codegen.render", None)
    with pytest.raises(RuntimeError, match="no shipped kernel serves"):
        loader.load(PROBLEM, config(), (rendered.name,))


@pytest.mark.parametrize("damage", [d for n, d in DAMAGES.items() if n != "a folder"])
def test_a_damaged_kernel_of_the_cache_is_replaced(
    damage: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path))
    (rendered,) = render(PROBLEM, config())
    loader.import_kernel(rendered.name, rendered.source)
    path = tmp_path / "kernels" / f"{rendered.name}.py"
    damage(path)
    loader.import_kernel(rendered.name, rendered.source)
    assert path.read_text() == rendered.source


def test_a_folder_in_the_place_of_a_kernel_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels" / "some_kernel.py").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"kernels cannot be kept in .*[Dd]irectory"):
        loader.import_kernel("some_kernel", "")
    assert [p.name for p in (tmp_path / "kernels").iterdir()] == ["some_kernel.py"]
