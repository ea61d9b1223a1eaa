"""The load generator against a server of ours that speaks as SGLang does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


class _Handler(BaseHTTPRequestHandler):
    """Answers with a function of the prompt, two tokens a chunk, the prefix of earlier prompts cached."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012 - made anew by each server
    incremental = False
    broken = False

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = tuple(asked["input_ids"])
        if self.broken:
            self.send_error(500, "out of memory")
            return
        cached = max((_common(prompt, p) for p in self.seen), default=0)
        self.seen.append(prompt)
        count = asked["sampling_params"]["max_new_tokens"]
        tokens = [(sum(prompt) + n) % 100 for n in range(count)]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for n in range(2, count + 2, 2):
            time.sleep(0.01)
            part = tokens[n - 2 : n] if self.incremental else tokens[:n]
            event = {
                "output_ids": part,
                "meta_info": {"completion_tokens": min(n, count), "cached_tokens": cached},
            }
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture(params=[False, True], ids=["cumulative", "incremental"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.syspath_prepend(str(TOOLS))
    handler = type("Handler", (_Handler,), {"seen": [], "incremental": request.param})
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def test_conversations_are_held(server: ThreadingHTTPServer) -> None:
    from engine_bench.sessions import Load, run, summary

    load = Load(sessions=4, rate=50.0, turns=3, shared=20, question=5, answer=7, pause=0.0, vocabulary=90)
    answers, seconds = run("127.0.0.1", server.server_port, load)
    assert [(a.session, a.turn) for a in answers] == [(s, t) for s in range(4) for t in range(3)]
    assert not any(a.error for a in answers)
    assert [a.prompt for a in answers[:3]] == [25, 37, 49]  # what was said before is sent again
    assert all(len(a.tokens) == 7 for a in answers)
    assert all(0 < a.first <= a.last for a in answers)
    assert all(a.cached >= 20 for a in answers if a.turn > 0)
    again, _ = run("127.0.0.1", server.server_port, load)
    assert [a.tokens for a in again] == [a.tokens for a in answers]  # the same load for every engine
    found = summary(answers, seconds)
    assert found["turns"] == 12
    assert found["tokens_s"] == pytest.approx(84 / seconds)
    assert found["ttft_p50"] <= found["ttft_p99"]
    assert 5 < found["tpot_mean"] < 500  # 10 ms for two tokens, on a busy machine more
    assert 0 < found["cached"] < 1


def test_failures_are_counted_not_raised(server: ThreadingHTTPServer) -> None:
    from engine_bench.sessions import Load, run, summary

    server.RequestHandlerClass.broken = True  # type: ignore[attr-defined]
    answers, seconds = run("127.0.0.1", server.server_port, Load(sessions=2, rate=50, turns=3, pause=0.0))
    assert len(answers) == 2  # a conversation ends with its first failure
    assert all("status 500" in a.error for a in answers)
    assert summary(answers, seconds)["failed"] == 2
    unreachable, _ = run("127.0.0.1", 1, Load(sessions=1, turns=1))
    assert "ConnectionRefusedError" in unreachable[0].error


def test_a_server_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import argparse

    import bench_serving
    from engine_bench.sessions import Load

    args = argparse.Namespace(
        model=str(tmp_path), nodes=4, steps=2, topk=2, batch=[1], dtype="bfloat16", engine={}, start=30.0
    )
    (tmp_path / "bench").mkdir()
    bench_serving.make_paths(tmp_path / "bench")
    answers, _, why = bench_serving.measure("ar", args, Load(), tmp_path / "bench")
    assert answers == []
    assert "the server did not start" in why
    assert "sglang" in why  # the log says what is missing
