"""Load of a server: conversations that share a beginning, several turns each, arriving at random."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Load:
    """What is asked of a server.

    Attributes:
        sessions: conversations.
        rate: arrivals a second, exponential gaps (a Poisson process).
        turns: of each.
        shared: tokens of the beginning that all conversations have.
        question: tokens that each turn adds.
        answer: tokens that each turn asks for.
        pause: seconds between an answer and the next question.
        vocabulary: tokens are below it.
        seed: of tokens and arrivals: the same for every engine.
    """

    sessions: int = 16
    rate: float = 4.0
    turns: int = 3
    shared: int = 512
    question: int = 64
    answer: int = 128
    pause: float = 0.2
    vocabulary: int = 256
    seed: int = 0


@dataclass
class Answer:
    """One turn.

    Attributes:
        session: its conversation.
        turn: from 0.
        prompt: tokens sent.
        cached: of those, tokens that the server had a state for.
        first: seconds to the first token.
        last: seconds to the last one.
        tokens: the answer.
        error: what went wrong, or empty.
    """

    session: int
    turn: int
    prompt: int
    cached: int = 0
    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def token_seconds(self) -> float:
        """Seconds a token after the first."""
        return (self.last - self.first) / max(len(self.tokens) - 1, 1)


def ask(host: str, port: int, tokens: Sequence[int], load: Load, answer: Answer, timeout: float = 300.0) -> None:
    """Stream one answer from ``/generate``; what goes wrong is noted, not raised."""
    body = json.dumps(
        {
            "input_ids": list(tokens), "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": load.answer, "ignore_eos": True},
        }
    )  # fmt: skip
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    begun = time.perf_counter()
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"status {response.status}: {response.read(300)!r}"
            return
        for line in response:
            text = line.decode().strip()
            if not text.startswith("data:") or text == "data: [DONE]":
                continue
            _take(json.loads(text[5:]), answer, time.perf_counter() - begun)
    except (OSError, ValueError, http.client.HTTPException) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    if not answer.error and len(answer.tokens) != load.answer:
        answer.error = f"{len(answer.tokens)} tokens of {load.answer}"


def _take(event: dict[str, Any], answer: Answer, now: float) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    tokens, meta = event.get("output_ids") or [], event.get("meta_info", {})
    # A server sends all tokens so far, or the new ones alone.
    known = int(meta.get("completion_tokens", len(tokens)))
    answer.tokens = list(tokens) if len(tokens) == known else [*answer.tokens, *tokens]
    answer.cached = int(meta.get("cached_tokens", answer.cached))
    if answer.tokens:
        answer.first = answer.first or now
        answer.last = now


def run(host: str, port: int, load: Load) -> tuple[list[Answer], float]:
    """Run all conversations, each in a thread of its own.

    Returns:
        Every turn, and the seconds from the first arrival to the last token.
    """
    rng = random.Random(load.seed)
    shared = [rng.randrange(load.vocabulary) for _ in range(load.shared)]
    plans, at = [], 0.0
    for number in range(load.sessions):
        questions = [[rng.randrange(load.vocabulary) for _ in range(load.question)] for _ in range(load.turns)]
        plans.append((number, at, questions))
        at += rng.expovariate(load.rate)
    answers: list[Answer] = []
    lock = threading.Lock()
    begun = time.perf_counter()

    def converse(number: int, start: float, questions: list[list[int]]) -> None:
        time.sleep(max(0.0, start - (time.perf_counter() - begun)))
        text = list(shared)
        for turn, question in enumerate(questions):
            text += question
            answer = Answer(number, turn, len(text))
            ask(host, port, text, load, answer)
            with lock:
                answers.append(answer)
            if answer.error:
                return
            text += answer.tokens
            time.sleep(load.pause)

    threads = [threading.Thread(target=converse, args=plan, daemon=True) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun - load.pause
    return sorted(answers, key=lambda a: (a.session, a.turn)), seconds


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Return means and percentiles, milliseconds, over turns without an error."""
    good = [a for a in answers if not a.error]
    found = {"turns": float(len(good)), "failed": float(len(answers) - len(good))}
    for name, values in (
        ("ttft", [a.first for a in good]), ("tpot", [a.token_seconds for a in good]),
    ):  # fmt: skip
        ordered = sorted(1e3 * v for v in values)
        if ordered:
            found[f"{name}_mean"] = sum(ordered) / len(ordered)
            found[f"{name}_p50"] = ordered[len(ordered) // 2]
            found[f"{name}_p99"] = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    found["tokens_s"] = sum(len(a.tokens) for a in good) / seconds
    found["cached"] = sum(a.cached for a in good) / max(sum(a.prompt for a in good), 1)
    return found
