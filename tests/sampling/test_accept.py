"""Acceptance: the walk against a plain loop, ties, unusable rows, padding, packed trees, compaction, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bole_runtime import Acceptance, SamplingParams, TreeBatch, accept, accept_predicted
from bole_runtime.sampling import STATUS_DRAFT, STATUS_LOGITS, STATUS_TOKEN, compact_, target_probs, uniform

NAN, INF = float("nan"), float("inf")
FIELDS = ("accepted", "path", "lengths", "bonus", "tokens", "source", "target", "status")


@st.composite
def forests(draw: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Parents and tokens of a batch; few token values, so that children share them."""
    parents, tokens = [], []
    for _ in range(draw(st.integers(1, 3))):
        row = [draw(st.sampled_from([-1, -2]))]
        for i in range(1, draw(st.integers(1, 8))):
            row.append(draw(st.sampled_from([-1, -2, *[j for j in range(i) if row[j] != -2] * 3])))
        parents.append(row)
        tokens.append([draw(st.integers(-1, 4)) for _ in row])
    return parents, tokens


def plain_walk(parents: list[int], tokens: list[int], predicted: list[int], steps: int) -> tuple[list[int], int]:
    """Return the accepted path and the emitted token."""
    roots = [i for i, p in enumerate(parents) if p == -1]
    if not roots:
        return [], -1
    path = [roots[0]]
    while len(path) <= steps + 1:
        said = predicted[path[-1]]
        below = [i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == said]
        if not below:
            return path, said
        path.append(below[0])
    raise AssertionError("deeper than the tree")


def build(parents: list[list[int]], tokens: list[list[int]], packed: bool) -> tuple[TreeBatch, torch.Tensor]:
    width = max(len(row) for row in parents)
    if packed:
        ends = [sum(len(row) for row in parents[:b]) for b in range(len(parents) + 1)]
        tree = TreeBatch.from_packed(torch.tensor([p for row in parents for p in row]), torch.tensor(ends), width)
        return tree, torch.tensor([t for row in tokens for t in row])
    padded = [row + [-2] * (width - len(row)) for row in parents]
    return TreeBatch.from_parents(torch.tensor(padded)), torch.tensor([r + [-1] * (width - len(r)) for r in tokens])


@settings(max_examples=60, deadline=None)
@given(forest=forests(), packed=st.booleans(), data=st.data())
def test_greedy_is_the_plain_walk(forest: Any, packed: bool, data: Any) -> None:
    parents, tokens = forest
    tree, flat = build(parents, tokens, packed)
    size = 4
    said = [[data.draw(st.integers(0, size - 1)) for _ in row] for row in parents]
    _, spread = build(parents, said, packed)
    # Other logits tie with the second place; rows of padding nodes hold NaN.
    logits = torch.nn.functional.one_hot(spread.clamp(min=0), size).float()
    logits[tree.depths < 0] = NAN
    by_logits = accept(logits, flat, tree)
    by_token = accept_predicted(spread, flat, tree)
    for name in FIELDS:
        assert torch.equal(getattr(by_logits, name), getattr(by_token, name)), name
    assert by_logits.status.tolist() == [0] * len(parents)
    starts = tree.offsets.tolist() if packed else [b * tree.max_nodes for b in range(len(parents))]
    for b, row in enumerate(parents):
        path, token = plain_walk(row, tokens[b], said[b], tree.max_depth)
        pad = [-1] * (tree.max_depth + 1 - len(path))
        assert by_logits.path[b].tolist() == path + pad
        assert int(by_logits.accepted[b]) == (path[-1] if path else -1)
        assert int(by_logits.lengths[b]) == len(path)
        assert int(by_logits.bonus[b]) == token
        emitted = [tokens[b][i] for i in path[1:]] + [token] * bool(path)
        assert by_logits.tokens[b].tolist() == emitted + pad
        assert by_logits.source[b].tolist() == [starts[b] + i for i in path] + pad
        assert by_logits.target[b].tolist() == [starts[b] + j for j in range(len(path))] + pad


def test_a_path_follows_parents_not_indices() -> None:
    # Nothing accepted of a padding row, the root alone, and node 4 by 0, 2, 4.
    parents = torch.tensor([[-2] * 5, [-1, 0, 0, 1, 2], [-1, 0, 0, 1, 2]])
    tokens = torch.arange(5).expand(3, -1)
    said = torch.tensor([[0] * 5, [9] * 5, [2, 9, 4, 9, 9]])
    got = accept_predicted(said, tokens, TreeBatch.from_parents(parents))
    assert got.accepted.tolist() == [-1, 0, 4]
    assert got.path[:, :3].tolist() == [[-1, -1, -1], [0, -1, -1], [0, 2, 4]]
    assert got.tokens[:, :3].tolist() == [[-1, -1, -1], [9, -1, -1], [2, 4, 9]]


def test_a_topology_changed_in_place_takes_effect() -> None:
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 1, 2]]))
    out = Acceptance.empty(tree)
    tokens, said = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[1, 2, 3, 4]])
    for parents, path in (([-1, 0, 1, 2], [0, 1, 2, 3]), ([-1, 0, 0, 0], [0, 1, -1, -1]), ([-2] * 4, [-1] * 4)):
        tree.update_(torch.tensor([parents]))
        assert accept_predicted(said, tokens, tree, out=out).path.tolist() == [path]


def test_greedy_ties_go_to_the_lowest_id_and_to_the_first_child() -> None:
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 0]]))
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0]).expand(1, 4, 4)
    got = accept(logits, torch.tensor([[0, 2, 1, 1]]), tree)
    assert (got.path.tolist()[0][:2], got.bonus.tolist()) == ([0, 2], [1])


def test_a_draft_token_without_probability_is_never_accepted() -> None:
    # Target [0, 1], draft token 0, random number 0: must emit 1.
    tree = TreeBatch.chain(1, 2)
    logits = torch.tensor([0.0, 1.0]).log().expand(1, 2, 2)
    zero = torch.zeros(1, 2, 2)
    for options in ({"method": "sample"}, {"method": "rejection", "draft_probs": torch.full((1, 2, 2), 0.5)}):
        got = accept(logits, torch.tensor([[0, 0]]), tree, uniforms=zero, **options)  # type: ignore[arg-type]
        assert (got.accepted.tolist(), got.bonus.tolist(), got.lengths.tolist()) == ([0], [1], [1])


def test_a_draft_equal_to_the_target_is_accepted_whole() -> None:
    gen = torch.Generator().manual_seed(0)
    batch, nodes, size = 2000, 6, 50
    logits = torch.randn(batch, nodes, size, generator=gen) * 3
    params = SamplingParams(batch, temperature=0.8, top_k=20, top_p=0.9)
    probs = target_probs(logits, params)
    drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=gen).view(batch, nodes)
    tokens = drawn.roll(1, 1)  # the token of node i + 1 comes from row i
    got = accept(
        logits, tokens, TreeBatch.chain(batch, nodes), method="rejection", params=params, draft_probs=probs,
        seeds=torch.arange(batch), positions=torch.zeros(batch, dtype=torch.int32),
    )  # fmt: skip
    assert (got.lengths == nodes).all()
    assert (got.status == 0).all()


def test_sampling_a_tree_gives_the_tokens_of_plain_decoding() -> None:
    # The target's logits depend on the last token alone, so that plain decoding can be replayed.
    gen = torch.Generator().manual_seed(1)
    size, length, batch = 5, 12, 40
    table = torch.randn(size, size, generator=gen)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=gen)
    params = SamplingParams(batch, temperature=0.7, top_p=0.95)

    def decode(tree_of: Any) -> list[list[int]]:
        done = [[0] for _ in range(batch)]
        while min(len(row) for row in done) < length:
            parents, drafts = tree_of([row[-1] for row in done])
            tree = TreeBatch.from_parents(parents)
            positions = torch.tensor([len(row) - 1 for row in done])
            got = accept(table[drafts], drafts, tree, method="sample", params=params, seeds=seeds, positions=positions)
            for row, new, n in zip(done, got.tokens.tolist(), got.lengths.tolist(), strict=True):
                row.extend(new[:n])
        return [row[:length] for row in done]

    def alone(last: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((batch, 1), -1), torch.tensor(last).unsqueeze(1)

    def wide(last: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3]).expand(batch, -1)
        drafts = torch.randint(0, size, (batch, 7), generator=gen)
        drafts[:, 0] = torch.tensor(last)
        return parents, drafts

    assert decode(wide) == decode(alone)


def test_the_result_does_not_depend_on_the_batch() -> None:
    gen = torch.Generator().manual_seed(2)
    batch, nodes, size = 6, 7, 9
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]]).expand(batch, -1).contiguous()
    logits = torch.randn(batch, nodes, size, generator=gen)
    tokens = torch.randint(0, size, (batch, nodes), generator=gen)
    draft = torch.rand(batch, nodes, size, generator=gen)
    seeds, positions = torch.arange(batch) * 77, torch.arange(batch)
    options = {"temperature": torch.linspace(0, 2, batch), "top_k": torch.arange(batch), "top_p": torch.full((6,), 0.9)}
    for method in ("sample", "rejection"):
        extra = {"draft_probs": draft} if method == "rejection" else {}
        whole = accept(
            logits, tokens, TreeBatch.from_parents(parents), method=method, seeds=seeds, positions=positions,
            params=SamplingParams(batch, **options), **extra,
        )  # fmt: skip
        for b in range(batch):
            one = slice(b, b + 1)
            alone = accept(
                logits[one], tokens[one], TreeBatch.from_parents(parents[one]), method=method, seeds=seeds[one],
                positions=positions[one], params=SamplingParams(1, **{k: v[one] for k, v in options.items()}),
                **{k: v[one] for k, v in extra.items()},
            )  # fmt: skip
            assert torch.equal(alone.tokens[0], whole.tokens[b])


@pytest.mark.parametrize("method", ["greedy", "sample", "rejection"])
def test_rows_that_cannot_be_used_are_reported_and_stop_the_walk(method: str) -> None:
    batch, size = 5, 4
    logits = torch.zeros(batch, 3, size)
    logits[:, :, 1] = 9.0
    logits[0, 0] = NAN
    logits[1, 0, 2] = NAN
    logits[2, 1, 3] = INF
    logits[3, 1] = -INF
    logits[4, 2] = NAN  # never visited
    tokens = torch.tensor([[0, 1, 3]]).expand(batch, -1)
    options: dict[str, Any] = {} if method == "greedy" else {"method": method, "uniforms": torch.zeros(batch, 3, 2)}
    if method != "greedy":
        options["params"] = SamplingParams(batch, temperature=0.01)
    if method == "rejection":
        options["draft_probs"] = torch.full((batch, 3, size), 0.25)
    got = accept(logits, tokens, TreeBatch.from_parents(torch.tensor([[-1, 0, 1]]).expand(batch, -1)), **options)
    assert got.status.tolist() == [STATUS_LOGITS] * 4 + [0]
    assert got.accepted.tolist() == [0, 0, 1, 1, 1]
    assert got.bonus.tolist() == [0, 1, 3, 0, 1]


def test_an_unusable_draft_row_is_reported_and_accepts_nothing() -> None:
    logits = torch.zeros(4, 2, 2)
    # The last one has a sum that is not what it would be divided by: its child would always be accepted.
    draft = torch.tensor([[NAN, 1.0], [-1.0, 2.0], [0.0, 0.0], [4e-34, 6e-34]]).unsqueeze(1).repeat(1, 2, 1)
    got = accept(
        logits, torch.ones(4, 2, dtype=torch.int32), TreeBatch.chain(4, 2), method="rejection", draft_probs=draft,
        uniforms=torch.zeros(4, 2, 2),
    )  # fmt: skip
    assert got.status.tolist() == [STATUS_DRAFT, STATUS_DRAFT, 0, STATUS_DRAFT]
    assert (got.accepted.tolist(), got.bonus.tolist()) == ([0] * 4, [0] * 4)


def test_tokens_outside_the_vocabulary() -> None:
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0]]))
    tokens = torch.tensor([[0, -1, 70]])
    logits = torch.zeros(1, 3, 2)
    draft = torch.full((1, 3, 2), 0.5)
    got = accept(logits, tokens, tree, method="rejection", draft_probs=draft, uniforms=torch.zeros(1, 3, 2))
    assert (got.accepted.tolist(), got.bonus.tolist()) == ([0], [0])
    got = accept_predicted(torch.tensor([[-1, 0, 0]]), tokens, tree)
    assert (got.accepted.tolist(), got.bonus.tolist(), got.status.tolist()) == ([0], [0], [STATUS_TOKEN])


def test_an_empty_batch_and_padding_requests() -> None:
    got = accept(torch.zeros(0, 3, 5), torch.zeros(0, 3, dtype=torch.int64), TreeBatch(0, 3))
    assert got.accepted.shape == (0,)
    tree = TreeBatch(2, 3)
    got = accept(torch.full((2, 3, 5), NAN), torch.full((2, 3), 99), tree)
    assert (got.accepted.tolist(), got.lengths.tolist(), got.bonus.tolist()) == ([-1, -1], [0, 0], [-1, -1])
    assert got.status.tolist() == [0, 0]


def test_out_is_reused() -> None:
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 1]]))
    out = Acceptance.empty(tree)
    pointer = out.path.data_ptr()
    for said, length in (([1, 2, 3], 3), ([5, 2, 3], 1)):
        got = accept_predicted(torch.tensor([said]), torch.tensor([[0, 1, 2]]), tree, out=out)
        assert got is out
        assert out.lengths.tolist() == [length]
        assert out.path.tolist()[0][length:] == [-1] * (3 - length)
    assert out.path.data_ptr() == pointer


@pytest.mark.parametrize("packed", [False, True])
def test_compaction_moves_the_path_to_the_front_and_nothing_else(packed: bool) -> None:
    parents, tokens = [[-1, 0, 0, 2], [-2], [-1, 0, 0, 1]], [[0, 1, 2, 3], [0], [0, 1, 2, 3]]
    tree, flat = build(parents, tokens, packed)
    _, said = build(parents, [[2, 0, 3, 0], [0], [9, 9, 9, 9]], packed)
    got = accept_predicted(said, flat, tree)
    buffer = torch.arange(tree.max_total).unsqueeze(1).repeat(1, 3)
    expected = buffer[:, 0].tolist()
    expected[1:3] = [2, 3]
    assert compact_(buffer, got)[:, 1].tolist() == expected


def test_compaction_errors() -> None:
    got = accept_predicted(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]]), TreeBatch.chain(1, 3))
    with pytest.raises(ValueError, match="buffer: 2 rows, but the accepted paths go up to row 2"):
        compact_(torch.zeros(2, 4), got)
    for wrong in (([1], got), (torch.zeros(3, 4), None)):
        with pytest.raises(TypeError, match=r"buffer, result: expected a torch.Tensor and an Acceptance"):
            compact_(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"buffer: expected .* got a scalar"):
        compact_(torch.tensor(1.0), got)


def test_numbers_are_philox() -> None:
    from bole_runtime.sampling.philox import philox

    # Known answers of the Random123 distribution.
    zero = [int(w) for w in philox(torch.tensor(0), 0, 0, 0, 0)]
    assert zero == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [int(w) for w in philox(torch.tensor(-1), *[2**32 - 1] * 4)]
    assert ones == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    numbers = uniform(torch.arange(100_000), torch.tensor(5), 0)
    assert (float(numbers.min()) >= 0, float(numbers.max()) < 1) == (True, True)
    assert abs(float(numbers.mean()) - 0.5) < 0.005


def test_argument_errors() -> None:
    tree = TreeBatch.chain(2, 3)
    logits, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    seeds = torch.zeros(2, dtype=torch.int64)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "method: 'best' is not allowed; allowed: greedy, sample, rejection", {"method": "best"}),
        (ValueError, "seeds: not used by method 'greedy'", {"seeds": seeds}),
        (ValueError, "seeds: required by method 'sample'", {"method": "sample"}),
        (ValueError, "positions: required by method 'sample'", {"method": "sample", "seeds": seeds}),
        (ValueError, "draft_probs: required", {"method": "rejection", "seeds": seeds, "positions": seeds}),
        (ValueError, "draft_probs: not used", {"method": "sample", "seeds": seeds, "positions": seeds,
                                               "draft_probs": logits}),
        (TypeError, r"seeds: dtype torch\.int32", {"method": "sample", "seeds": seeds.int(), "positions": seeds}),
        (ValueError, r"positions: expected shape \(2,\)", {"method": "sample", "seeds": seeds,
                                                          "positions": seeds[:1]}),
        (ValueError, "params: for 3 requests", {"method": "sample", "seeds": seeds, "positions": seeds,
                                                "params": SamplingParams(3)}),
        (ValueError, "give either uniforms or seeds", {"method": "sample", "seeds": seeds,
                                                       "uniforms": torch.zeros(2, 3, 2)}),
        (ValueError, r"uniforms: expected shape \(2, 3, 2\)", {"method": "sample", "uniforms": torch.zeros(2, 3)}),
        (ValueError, r"out\.accepted: expected torch\.int32 \(2,\)", {"out": Acceptance.empty(TreeBatch.chain(1, 3))}),
    ]  # fmt: skip
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            accept(logits, tokens, tree, **options)
    for wrong in (None, [[-1, 0, 1]]):
        with pytest.raises(TypeError, match="tree: expected a TreeBatch, got"):
            accept(logits, tokens, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="tree: expected a TreeBatch, got"):
            accept_predicted(tokens, tokens, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="logits: expected a floating-point tensor, got list"):
        target_probs([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logits: .* with V >= 1, got shape \(2, 0\)"):
        target_probs(logits[:, 0, :0])
    with pytest.raises(ValueError, match=r"logits: expected shape \(2, 3, V\)"):
        accept(logits[:1], tokens, tree)
    with pytest.raises(TypeError, match=r"logits: dtype torch\.float64"):
        accept(logits.double(), tokens, tree)
    with pytest.raises(ValueError, match="vocabulary must be contiguous"):
        accept(torch.zeros(2, 5, 3).transpose(1, 2), tokens, tree)
    with pytest.raises(ValueError, match=r"tokens: expected shape \(2, 3\)"):
        accept(logits, tokens[:, :2], tree)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature: -1.0 is not allowed; allowed: finite and >= 0"),
        ({"temperature": [1.0, NAN]}, ValueError, "temperature: nan"),
        ({"top_p": 0.0}, ValueError, "top_p: 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p: 1.5"),
        ({"min_p": -0.1}, ValueError, "min_p: -0.1"),
        ({"top_k": 2.5}, TypeError, "top_k: 2.5"),
        ({"top_k": [1, 2, 3]}, ValueError, r"top_k: expected shape \(2,\)"),
        ({"temperature": "warm"}, TypeError, "temperature: 'warm'"),
        ({"temperature": None}, TypeError, "temperature: None"),
        ({"top_k": 2**40}, ValueError, r"top_k: 1099511627776 is not allowed; allowed: an integer below 2\*\*31"),
        ({"temperature": torch.tensor([True, False])}, TypeError, "temperature: dtype torch.bool"),
        ({"temperature": 1j}, TypeError, "temperature: 1j"),
        # What is kept is fp32: infinite there, or 0.
        ({"temperature": torch.full((2,), 1e39, dtype=torch.float64)}, ValueError, r"temperature: 1e\+39"),
        ({"top_p": torch.full((2,), 1e-60, dtype=torch.float64)}, ValueError, "top_p: 1e-60"),
        ({"batch": 2.0}, TypeError, "batch: expected an int, got float"),
        ({"batch": -1}, ValueError, "batch: -1 is not allowed"),
    ],
)
def test_parameter_errors(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        SamplingParams(**{"batch": 2, **options})
