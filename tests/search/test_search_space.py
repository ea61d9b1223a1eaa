"""Valid space, sampler, targets, model and the choice between finalists."""

from __future__ import annotations

from typing import Any

import pytest
import table_fakes as fakes

from bole_codegen.search.choose import choose
from bole_codegen.search.results import Failed, Timed
from bole_codegen.search.roofline import floor_us, predict_us, promising
from bole_codegen.search.sampler import Sampler
from bole_codegen.search.space import SpaceView, space_hash, view_all
from bole_codegen.search.targets import Geometry, Target, anchors, classes, make_targets, nearest_anchor
from bole_runtime import gpus
from bole_runtime.families import KERNEL_FAMILIES, get_family
from bole_runtime.kernels.problem import Problem, work_bucket
from bole_runtime.kernels.space import Config, Param
from bole_runtime.kernels.variants import all_variants, get_variant

H100 = gpus.get("h100")


def make(**changes: Any) -> tuple[Target, ...]:
    options: dict[str, Any] = {
        "ops": ["verify"],
        "families": ["gdn"],
        "in_dtypes": ["bf16"],
        "state_dtypes": ["fp32"],
        "gate_modes": ["raw"],
        "precisions": ["fast"],
        "nodes": [16],
        "batches": [1, 8, 64],
        "pendings": [0],
    }
    return make_targets([Geometry(16, 32, 128, 128)], **{**options, **changes})


@pytest.mark.parametrize(
    "problem", [t.problem for t in make(nodes=[16, 64], batches=[1], precisions=["fast", "lossless"])]
)
def test_the_view_holds_every_valid_value_and_nothing_invalid(problem: Problem) -> None:
    limits = H100.limits()
    for variant in all_variants("verify"):
        if variant.applies(problem) is not None:
            continue
        view = SpaceView(variant, problem, limits)
        assert all(variant.reason(problem, c, limits) is None for c in view.configs)
        assert view.default in view.configs
        assert len(set(view.configs)) == len(view.configs)


def test_a_small_space_is_found_in_full() -> None:
    view = SpaceView(fakes.FUSED, fakes.PROBLEM, fakes.LIMITS)
    assert set(view.configs) == set(fakes.FUSED.enumerate(fakes.PROBLEM, fakes.LIMITS))


def test_nearest_valid_configuration() -> None:
    view = SpaceView(fakes.FUSED, fakes.PROBLEM, fakes.LIMITS)
    wanted = {"BV": 256, "STAGES": 3, "MODE": "rhs"}  # Too much shared memory.
    first = view.nearest(wanted, lambda c: False)
    assert first is not None
    assert (first["BV"], first["STAGES"]) in ((256, 1), (128, 3), (256, 2))
    second = view.nearest(wanted, lambda c: c == first)
    assert second != first
    assert view.nearest(wanted, lambda c: True) is None


def test_the_hash_of_a_space_follows_its_declaration() -> None:
    import dataclasses

    more = dataclasses.replace(fakes.FUSED, params=(*fakes.FUSED.params, Param("NEW", (1, 2), "")))
    assert len({space_hash([fakes.FUSED]), space_hash([more]), space_hash([fakes.FUSED], "other protocol")}) == 3


def test_the_sampler_stays_in_the_space_and_never_repeats() -> None:
    problem = make(batches=[8])[0].problem
    views = view_all(all_variants("verify"), problem, H100.limits())
    sampler = Sampler(views, seed=0, budget=30)
    assert not sampler.enumerated
    seen: set[Config] = set()
    for i in range(30):
        config = sampler.ask(seen.__contains__)
        assert config is not None
        assert config not in seen
        assert get_variant("verify", config.variant).reason(problem, config, H100.limits()) is None
        seen.add(config)
        sampler.tell(config, None if i % 5 == 0 else float(i % 7 + 1))


def test_the_sampler_enumerates_a_small_space_and_takes_what_is_queued_first() -> None:
    views = view_all([fakes.FUSED], fakes.PROBLEM, fakes.LIMITS)
    sampler = Sampler(views, seed=0, budget=1000)
    first = fakes.FUSED.config({"BV": 128, "STAGES": 3, "MODE": "inverse"})
    outside = Config("fused", (("BV", 256), ("STAGES", 3), ("MODE", "rhs")))
    sampler.enqueue([outside, first])
    seen: list[Config] = []
    while (config := sampler.ask(seen.__contains__)) is not None:
        seen.append(config)
    assert seen[0] == first
    assert set(seen) == set(views[0].configs)


def test_buckets_of_a_class_share_kernels() -> None:
    targets = make(batches=[1, 8, 64], precisions=["fast", "lossless"], depths=[8, 16])
    groups = classes(targets)
    assert [len(g) for g in groups.values()] == [6, 6]
    assert {t.problem.depth for t in targets} == {8, 16}
    assert all(t.problem.work == work_bucket(t.batch, t.hv) for t in targets)


def test_launches_of_one_bucket_are_merged() -> None:
    targets = make_targets(
        [Geometry(16, 32, 128, 128), Geometry(8, 16, 128, 128)],
        ops=["verify"],
        families=["gdn"],
        in_dtypes=["bf16"],
        state_dtypes=["fp32"],
        gate_modes=["raw"],
        precisions=["fast"],
        nodes=[9, 16],
        batches=[1, 2],
        pendings=[0],
    )
    assert sorted(t.problem.work for t in targets) == [16, 32, 64]


@pytest.mark.parametrize(
    "change", [{"nodes": [0]}, {"nodes": [4096]}, {"batches": [0]}, {"pendings": [-1]}, {"depths": [1 << 20]}]
)
def test_sizes_outside_the_buckets_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least|above the largest"):
        make(**change)


def test_anchors_are_spread_and_hold_both_ends() -> None:
    members = make(batches=[1, 2, 4, 8, 16, 32, 64])
    assert [t.problem.work for t in anchors(members, 3)] == [32, 256, 2048]
    assert [t.problem.work for t in anchors(members, 1)] == [256]
    assert anchors(members, 99) == members
    assert nearest_anchor(members[1], anchors(members, 3)).problem.work == 32


@pytest.mark.parametrize("op", ["verify", "commit"])
def test_the_model_is_finite_and_above_the_floor(op: str) -> None:
    for target in make(ops=[op], batches=[1, 256], nodes=[16, 128]):
        views = view_all(all_variants(op), target.problem, H100.limits())
        for view in views:
            for config in view.configs[:: max(1, len(view.configs) // 50)]:
                us = predict_us(target, config, view.variant, H100)
                assert floor_us(target, H100) < us < 1e6


def test_the_model_follows_simple_kernels_measured_on_an_h200() -> None:
    # Microseconds of untuned kernels, fast profile: (B, N) to (fused, two kernels).
    for (batch, nodes), times in {
        (1, 16): (5.7, 8.4),
        (8, 64): (36, 30),
        (64, 16): (96, 63),
        (64, 64): (249, 171),
    }.items():
        (target,) = make(batches=[batch], nodes=[nodes], gate_modes=["ready"])
        record = gpus.get("h200")
        for name, us in zip(("fused", "two_stage"), times, strict=True):
            variant = get_variant("verify", name)
            config = variant.default(target.problem, record.limits())
            assert 0.4 < predict_us(target, config, variant, record) / us < 2.5


def test_promising_candidates_cover_every_variant_and_differ() -> None:
    (target,) = make(batches=[8])
    views = view_all(all_variants("verify"), target.problem, H100.limits())
    configs = [c for v in views for c in v.configs[:500]]
    found = promising(target, configs, lambda n: get_variant("verify", n), H100, 8)
    assert len(found) == len(set(found)) == 8
    assert {c.variant for c in found} == {v.variant.name for v in views}


def config(bv: int) -> Config:
    return fakes.FUSED.config({"BV": bv, "STAGES": 1, "MODE": "rhs"})


def times(**us: float) -> dict[Config, Any]:
    return {config(int(k[1:])): Timed(v, 0.0) for k, v in us.items()}


@pytest.mark.parametrize(
    ("us", "default", "incumbent", "want"),
    [
        ({"b16": 10.0, "b32": 9.0}, 16, None, 32),
        ({"b16": 10.0, "b32": 9.95}, 16, None, 16),  # Within noise: the default is simpler than a change.
        ({"b16": 10.0, "b32": 9.95, "b64": 9.96}, 16, 64, 64),  # The table's entry goes before the default.
        ({"b16": 10.0, "b32": 10.05}, 16, 32, 16),  # Never slower than the default, not even by noise.
        ({"b16": 10.0, "b32": 8.0, "b64": 8.05}, 16, 64, 64),
        ({"b32": 8.0}, 16, None, 32),
    ],
)
def test_the_choice_between_finalists(us: dict[str, float], default: int, incumbent: int | None, want: int) -> None:
    held = None if incumbent is None else config(incumbent)
    assert choose(times(**us), config(default), held, lambda c: 1) == config(want)


def test_fewer_kernels_win_a_tie_and_failures_never() -> None:
    results = {**times(b32=9.0, b64=9.02), config(16): Failed("wrong", "")}
    assert choose(results, config(16), None, lambda c: 2 if c["BV"] == 32 else 1) == config(64)
    assert choose({config(16): Failed("wrong", "")}, config(16), None, lambda c: 1) is None


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_buckets_normalise_as_their_family_does(family: str) -> None:
    """What is compiled ahead for a bucket is what a call of it launches."""
    spec = get_family(family)
    (target,) = make_targets(
        [Geometry(1, 2, 16, 16)], ops=["verify"], families=[family], in_dtypes=["bf16"], state_dtypes=["fp32"],
        gate_modes=[spec.modes[-1]], precisions=["fast"], nodes=[16], batches=[1], pendings=[0],
    )  # fmt: skip
    assert target.problem.qk_l2norm is spec.qk_l2norm
    other = "lightning" if spec.qk_l2norm else "gdn"
    assert target.problem.replace(family=other).qk_l2norm is not spec.qk_l2norm
    assert target.problem.replace(family=other, qk_l2norm=spec.qk_l2norm).qk_l2norm is spec.qk_l2norm
