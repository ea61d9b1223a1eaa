"""Markers that depend on the machine, and the child process of the interpreter tests."""

from __future__ import annotations

import importlib.util
import os

import pytest
from bole_testing.interpreter import InterpreterChild, InterpreterRelay


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests marked exhaustive too")
    parser.addoption("--interpreter-child", default=None, help="internal: read,write descriptors of the parent")


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        # Threads of every worker on every core wait for one another. Before torch is imported, which reads it.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    pipes = config.getoption("--interpreter-child")
    if pipes:
        config.pluginmanager.register(InterpreterChild(*(int(fd) for fd in pipes.split(","))))
    else:
        config.pluginmanager.register(InterpreterRelay(config))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        _skip(items, "gpu", "needs a CUDA device")
    if importlib.util.find_spec("triton") is None:
        _skip(items, "interpreter", "needs Triton")
    if not config.getoption("--exhaustive"):
        _skip(items, "exhaustive", "needs --exhaustive")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))
