"""Rounds that are recorded: the same text, nothing read on the host meanwhile, and a way on where recording fails.

A graph cannot be captured on a CPU. Here a stand-in runs the recorded function anew and writes what it returns into the
tensors that the first replay gave out, as a graph does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from bole_testing.hybrid import MODELS, build, plain, scaled
from torch.utils._python_dispatch import TorchDispatchMode

from bole_runtime import SamplingParams, TreeBatch
from bole_runtime.integrations.transformers import MtpDrafter, MtpHead, PromptLookup, TreeDecoder, graphs, lane
from bole_runtime.state.round import Round

pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")

PROMPT = [3, 17, 5, 9, 9, 30, 3, 17, 5]


class StandIn:
    """A graph of one recorded function."""

    count = 0

    def __init__(self, recorded: Any) -> None:
        self.recorded = recorded
        StandIn.count += 1

    def replay(self) -> None:
        recorded = self.recorded
        made = recorded._function()
        if recorded._made is None:
            recorded._made = made
            return
        for old, new in zip(_tensors(recorded._made), _tensors(made), strict=True):
            old.copy_(new)


def _tensors(made: Any) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    return [getattr(made, field.name) for field in dataclasses.fields(made)]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    def record(self: Any) -> None:
        self._graph = StandIn(self)

    monkeypatch.setattr(graphs.Recorded, "_record", record)
    StandIn.count = 0
    return StandIn


def decoder_of(model: Any, drafter: Any, **options: Any) -> TreeDecoder:
    """Return one that records, on whatever device."""
    made = TreeDecoder(model, drafter, **options)
    made.recorder.enabled = True
    return made


def texts_of(decoder: TreeDecoder, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    rows = [list(prompt) for prompt in prompts]
    for result in decoder.rounds(prompts, **options):
        for row, tokens in zip(rows, result.tokens, strict=True):
            row.extend(tokens)
    return rows


@pytest.mark.parametrize("policy", ["eager", "fused", "deferred"])
def test_the_same_text_from_graphs(qwen: Any, recording: Any, policy: str) -> None:
    """Batch after batch on one decoder, over the columns that the caches begin with."""
    prompts = [PROMPT, [7, 1, 2]]
    decoder = decoder_of(qwen, PromptLookup(), budget=7, max_batch=2, policy=policy)
    wants = [plain(qwen, prompt, 125) for prompt in prompts]
    assert texts_of(decoder, prompts, max_new_tokens=125) == wants
    assert 2 <= recording.count <= 8  # buckets of nodes, twice where columns were added
    before = recording.count
    shorter = [want[: len(prompt) + 40] for want, prompt in zip(wants, prompts, strict=True)]
    assert texts_of(decoder, prompts[::-1], max_new_tokens=40) == shorter[::-1]
    assert texts_of(decoder, prompts[:1], max_new_tokens=20) == [wants[0][: len(PROMPT) + 20]]
    assert recording.count <= before + 4
    assert decoder.manager.free_slots == 2


def test_two_batches_that_are_open_have_graphs_of_their_own(qwen: Any, recording: Any) -> None:
    decoder = decoder_of(qwen, PromptLookup(), budget=4, max_batch=2)
    wants = [plain(qwen, prompt, 30)[len(prompt) :] for prompt in (PROMPT, [8, 1])]
    texts: list[list[int]] = [[], []]
    open_ = dict(enumerate([decoder.rounds(PROMPT, max_new_tokens=30), decoder.rounds([8, 1], max_new_tokens=30)]))
    while open_:
        for n in list(open_):
            result = next(open_[n], None)
            if result is None:
                del open_[n]
            else:
                texts[n] += result.tokens[0]
    assert texts == wants
    assert recording.count >= 2


def test_sampling_with_other_values_replays(qwen: Any, recording: Any) -> None:
    decoder = decoder_of(qwen, PromptLookup(), budget=4)
    plainly = TreeDecoder(qwen, None)

    def run(decoder: TreeDecoder, temperature: float, seed: int) -> list[list[int]]:
        params = SamplingParams(1, temperature=temperature, top_p=0.9)
        return texts_of(decoder, [PROMPT], max_new_tokens=16, params=params, seeds=[seed])

    first = run(decoder, 0.7, 1)
    before = recording.count
    assert first == run(plainly, 0.7, 1)
    assert run(decoder, 1.5, 2) == run(plainly, 1.5, 2) != first
    assert recording.count == before
    assert texts_of(decoder, [PROMPT], max_new_tokens=16) == [plain(qwen, PROMPT, 16)]


def test_drafts_of_a_head_from_graphs(qwen: Any, recording: Any) -> None:
    torch.manual_seed(5)
    drafter = MtpDrafter(scaled(MtpHead(qwen)), depth=3)
    drafter.recorder.enabled = True
    prompts = [PROMPT, [8, 1, 2]]
    decoder = TreeDecoder(qwen, drafter, budget=5, max_batch=2)
    one, other = [], []
    for _ in range(2):
        one.append(list(decoder.rounds(prompts, max_new_tokens=130)))
    assert recording.count in (2, 3)  # once more where columns were added
    drafter.recorder.enabled = False
    other.append(list(TreeDecoder(qwen, drafter, budget=5, max_batch=2).rounds(prompts, max_new_tokens=130)))
    assert one[0] == one[1] == other[0]


@pytest.mark.parametrize("policy", ["eager", "fused"])
def test_a_model_that_cannot_be_recorded(qwen: Any, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    def record(self: Any) -> None:
        # As a capture does: the calls are made and nothing has run; here, the first of them.
        round_ = next(c.cell_contents for c in self._function.__closure__ if isinstance(c.cell_contents, Round))
        round_._manager.current = round_
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs.Recorded, "_record", record)
    decoder = decoder_of(qwen, PromptLookup(), budget=4, policy=policy)
    with pytest.warns(
        RuntimeWarning, match=r"cannot be recorded .*\(operation not permitted when stream is capturing\)"
    ):
        assert texts_of(decoder, [PROMPT], max_new_tokens=20) == [plain(qwen, PROMPT, 20)]
    assert texts_of(decoder, [PROMPT], max_new_tokens=20) == [plain(qwen, PROMPT, 20)]


class NoReads(TorchDispatchMode):
    """Raises where the host would wait for the device, which a capture does not allow, outside of Bole's own calls."""

    HOST = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not self.inside and any(name == host or name.startswith("_unique") for host in self.HOST):
            raise RuntimeError(f"{name} reads the device")
        if not self.inside and name == "index" and any(t is not None and t.dtype is torch.bool for t in args[1]):
            raise RuntimeError("an index by a mask reads the device")
        return func(*args, **(kwargs or {}))


def test_reads_are_found() -> None:
    ones = torch.ones(3)
    for read in (lambda: ones[0].item(), lambda: ones[ones > 0], lambda: bool(ones.any()), lambda: ones.nonzero()):
        with NoReads(), pytest.raises(RuntimeError, match="reads the device"):
            read()


@pytest.mark.parametrize("name", [*MODELS])
def test_nothing_reads_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bole's own calls are captured in tests/gpu; everything around them is looked at here."""
    watch = NoReads()

    def own(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            watch.inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                watch.inside -= 1

        return call

    for owner, names in ((Round, ("conv", "verify", "commit")), (TreeBatch, ("update_", "mask")), (lane, ("accept",))):
        for method in names:
            monkeypatch.setattr(owner, method, own(getattr(owner, method)))
    run = lane.Lane._run

    def watched(*args: Any) -> Any:
        with watch:
            return run(*args)

    monkeypatch.setattr(lane.Lane, "_run", watched)
    decoder = TreeDecoder(build(name), PromptLookup(), budget=4)
    assert len(texts_of(decoder, [PROMPT], max_new_tokens=8)[0]) == len(PROMPT) + 8
