"""Decoding by rounds: draft, one forward over all trees, acceptance, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bole_runtime.integrations.transformers.draft import Drafter, DraftSession, HiddenDrafter, Proposal, checked
from bole_runtime.integrations.transformers.graphs import Recorder
from bole_runtime.integrations.transformers.inputs import Request, joined, requests, stop_tokens
from bole_runtime.integrations.transformers.lane import Lane, summary_of
from bole_runtime.integrations.transformers.model import HybridModel, Prefilled
from bole_runtime.sampling import SamplingParams
from bole_runtime.state import StateManager
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.tree import MAX_NODES

Prompts = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]
AnyDrafter = Drafter | HiddenDrafter
_NOTHING = Proposal((), ())


@dataclass(frozen=True)
class RoundResult:
    """What one round added.

    Attributes:
        tokens: the new tokens of each prompt; none where it had ended.
        nodes: nodes of each tree, the root included; 0 where a prompt had ended, and in the first result, which is the
            prefill's.
        accepted: nodes on the accepted path of each tree, the root included; 0 likewise.
    """

    tokens: list[list[int]]
    nodes: list[int]
    accepted: list[int]


class TreeDecoder:
    """Decodes prompts with proposal trees; the tokens are those of decoding without them.

    Made once for a model: pools and buffers are sized for ``max_batch`` prompts and ``budget`` nodes.

    Attributes:
        hybrid: the model.
        manager: states of its recurrent layers.
        drafter: proposes; None decodes token by token.
        budget: most nodes of a proposal.
    """

    def __init__(
        self,
        model: Any,
        drafter: AnyDrafter | None = None,
        *,
        budget: int = 15,
        max_batch: int = 1,
        policy: str = "eager",
        cuda_graphs: bool = False,
    ) -> None:
        """Check a model and allocate.

        Args:
            model: see :class:`~bole_runtime.integrations.transformers.model.HybridModel`.
            drafter: see :class:`~bole_runtime.integrations.transformers.Drafter`. None: a tree is its root.
            budget: most nodes of a proposal, beside the root.
            max_batch: most prompts at a time.
            policy: when accepted tokens enter the states; see docs/runtime.md.
            cuda_graphs: on a CUDA device, record each round in a graph: one for each number of prompts, bucket of
                nodes and size of the caches, from its second round on. A model that cannot be recorded (experts that
                are chosen on the host, say) is decoded without, after a warning.

        Raises:
            ImportError: transformers is not installed.
            TypeError: not a model, or not a drafter.
            ValueError: a model that is not supported (the layers are named), or a size out of range.
        """
        given: object = drafter
        if given is not None and not isinstance(given, (Drafter, HiddenDrafter)):
            name = type(given).__name__
            raise TypeError(f"drafter: {name} has no method propose(context, budget), nor begin(rows)")
        for size, what in (("budget", budget), ("max_batch", max_batch)):
            if not isinstance(what, int) or isinstance(what, bool):
                raise TypeError(f"{size}: expected an int, got {type(what).__name__}")
        if not 0 <= budget < MAX_NODES:
            raise ValueError(f"budget: {budget} is not allowed; allowed: 0 to {MAX_NODES - 1}")
        if max_batch < 1:
            raise ValueError(f"max_batch: {max_batch} is not allowed; allowed: 1 or more")
        self.hybrid = HybridModel(model)
        self.drafter, self.budget = drafter, budget
        self.recorder = Recorder(cuda_graphs and self.hybrid.device.type == "cuda")
        # By prompts: what a batch that ended has made and recorded serves the next one.
        self._idle: dict[int, list[Lane]] = {}
        self.manager = StateManager(
            self.hybrid.geometries,
            slots=max_batch,
            max_batch=max_batch,
            max_nodes=budget + 1,
            dtype=self.hybrid.dtype,
            policy=policy,
            device=self.hybrid.device,
        )

    def rounds(
        self,
        input_ids: Prompts,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 64,
        params: SamplingParams | None = None,
        seeds: Sequence[int] | int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Iterator[RoundResult]:
        """Decode, and yield what each round adds.

        Args:
            input_ids: int [B, P] or [P], or token lists, which may differ in length.
            attention_mask: for a tensor, [B, P]; tokens where it is 0 are left out.
            max_new_tokens: of each prompt.
            params: for B prompts, on the model's device. Default: greedy.
            seeds: one a prompt, or one from which prompt b takes ``seeds + b``. Prompt and seed decide the tokens.
            eos_token_id: ends a prompt. Default: the model's; an empty sequence: nothing does.

        Returns:
            An iterator. Stopping early is safe: its slots are free once it is closed or nothing refers to it any more.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: an argument is wrong, or (later) a proposal or the model's logits cannot be used.
        """
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool):
            raise TypeError(f"max_new_tokens: expected an int, got {type(max_new_tokens).__name__}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is not allowed; allowed: 1 or more")
        texts = requests(input_ids, attention_mask, self.hybrid.vocabulary)
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params: expected SamplingParams, got {type(params).__name__}")
        if params is not None and params.batch != len(texts):
            raise ValueError(f"params: for {params.batch} prompts, but there are {len(texts)}")
        if len(texts) > self.manager.config.max_batch:
            raise ValueError(
                f"input_ids: {len(texts)} prompts; allowed: at most max_batch = {self.manager.config.max_batch}"
            )
        given = [seeds + b for b in range(len(texts))] if isinstance(seeds, int) else list(seeds)
        if len(given) != len(texts):
            raise ValueError(f"seeds: {len(given)} for {len(texts)} prompts")
        stop = stop_tokens(self.hybrid.model, eos_token_id)
        made = [Request(text, max_new_tokens, stop) for text in texts]
        return self._decode(made, params, torch.tensor(given, device=self.hybrid.device))

    def _lane(self, batch: int) -> Lane:
        idle = self._idle.get(batch)
        return idle.pop() if idle else Lane(self.hybrid, self.manager, batch, self.budget + 1, self.recorder)

    @torch.no_grad()
    def _start(self, texts: Sequence[Request], slots: list[int], lane: Lane) -> tuple[torch.Tensor, list[Prefilled]]:
        """Read the prompts one by one; return the logits after each, and what else they left."""
        read = []
        for slot, request in zip(slots, texts, strict=True):
            done = self.hybrid.prefill(request.text)
            self.manager.import_states(slot, done.states, done.conv_states)
            read.append(done)
        lane.cache.fill(self.hybrid.attention, [done.keys for done in read], [done.values for done in read])
        return torch.cat([done.logits for done in read]), read

    def _decode(
        self, texts: list[Request], params: SamplingParams | None, seeds: torch.Tensor
    ) -> Iterator[RoundResult]:
        batch, device, none = len(texts), self.hybrid.device, [0] * len(texts)
        slots: list[int] = []
        lane = self._lane(batch)
        session = self.drafter.begin(batch) if isinstance(self.drafter, HiddenDrafter) else None
        try:
            slots.extend(self.manager.allocate() for _ in texts)
            sampling = lane.begin(slots, params, seeds)
            logits, read = self._start(texts, slots, lane)
            if session is not None:
                for row, done in enumerate(read):
                    session.observe(row, done.hidden)
            del read
            last = torch.tensor([[request.text[-1]] for request in texts], device=device)
            root = TreeBatch.chain(batch, 1, device)
            # The last token of a prompt is a tree of its own: what follows it is drawn like everything else.
            got = sampling(logits[:, None], last, root, lane.cache.lengths - 1)
            yield RoundResult(_extend(texts, summary_of(got))[0], none, none)
            committed = [request.prompt for request in texts]
            while not all(request.done for request in texts):
                proposals = self._propose(session, texts)
                counts = [0 if p is None else 1 + len(p.tokens) for p in proposals]
                tokens, parents = joined(texts, proposals, self._bucket(max(counts)))
                lane.cache.reserve(max(n + m for n, m in zip(committed, counts, strict=True)))
                made = lane.round(tokens, parents, sampling)
                added, lengths = _extend(texts, made.summary)
                if session is not None:
                    for row, count in enumerate(lengths):
                        if count:
                            session.observe(row, made.hidden[row, made.path[row, :count].long()])
                committed = [n + m for n, m in zip(committed, lengths, strict=True)]
                yield RoundResult(added, counts, lengths)
        finally:
            lane.end()
            if session is not None:
                session.end()
            for slot in slots:
                self.manager.free(slot)
            if self.recorder.enabled:
                self._idle.setdefault(batch, []).append(lane)

    def _propose(self, session: DraftSession | None, texts: Sequence[Request]) -> list[Proposal | None]:
        """Return the proposal of each text, None where it has ended."""
        # A path longer than what is still wanted would be cut off anyway; the last token needs no draft at all.
        wanted = [r.text if r.left > 1 and self.budget and not r.done else None for r in texts]
        found: list[Proposal | None] = [None if r.done else _NOTHING for r in texts]
        if self.drafter is None or not any(text is not None for text in wanted):
            return found
        if session is not None:
            given = list(session.propose(wanted, self.budget))
            if len(given) != len(texts):
                name = f"{type(self.drafter).__name__}: propose"
                raise ValueError(f"{name} returned {len(given)} proposals for {len(texts)} texts")
        else:
            assert isinstance(self.drafter, Drafter)
            given = [_NOTHING if text is None else self.drafter.propose(text, self.budget) for text in wanted]
        for b, text in enumerate(wanted):
            if text is not None:
                found[b] = checked(given[b], self.budget, self.hybrid.vocabulary, self.drafter)
        return found

    def _bucket(self, nodes: int) -> int:
        """Return the capacity of the tree that a round uses: few distinct ones, so that few are made."""
        return min(1 << (nodes - 1).bit_length(), self.budget + 1)


def _extend(texts: list[Request], summary: torch.Tensor) -> tuple[list[list[int]], list[int]]:
    """Append the new tokens to the texts; return those, and the length of each path. One read of the device."""
    rows = summary.tolist()
    bad = [b for b, row in enumerate(rows) if row[-1]]
    if bad:
        raise ValueError(f"model: logits of prompts {bad} have a NaN, an infinity or no finite value")
    lengths = [row[-2] for row in rows]
    return [r.extend(row[:n]) for r, row, n in zip(texts, rows, lengths, strict=True)], lengths
