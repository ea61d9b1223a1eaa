"""The ``bole-tune`` command that fills a gap, for warnings and reports."""

from __future__ import annotations

from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.problem import Problem, Specialisation, work_bucket


def geometry(problem: Problem) -> tuple[int, int, int]:
    """Return (HK, HV, B) of a launch that falls into the work bucket of ``problem``."""
    hk = 16
    while hk > 1 and hk * problem.group > problem.work:
        hk //= 2
    hv = hk * problem.group
    batch = max(1, problem.work // hv)
    return hk, hv, batch


def recurrence_command(problem: Problem, gpu: str) -> str:
    """Return the command for a recurrence."""
    hk, hv, batch = geometry(problem)
    words = [
        f"bole-tune --gpu {gpu} --families {problem.family} --ops {problem.op}",
        f"--hk {hk} --hv {hv} --dk {problem.dk} --dv {problem.dv} --batch {batch}",
        f"--nodes {problem.nodes} --depth {problem.depth} --pending {problem.pending}",
        f"--dtype {problem.in_dtype} --state-dtype {problem.state_dtype} --gates {problem.gate_mode}",
        f"--precision {problem.precision}",
    ]
    return " ".join(words)


def conv_command(problem: ConvProblem, gpu: str) -> str:
    """Return the command for a convolution."""
    switches = [
        *(["--bias"] if problem.bias else []),
        *([] if problem.silu or problem.op == "conv_commit" else ["--no-silu"]),
        *(["--dynamic"] if problem.dynamic else []),
    ]
    words = [
        f"bole-tune --gpu {gpu} --ops {problem.op}",
        f"--channels {problem.channels} --width {problem.width} --length {problem.length}",
        *switches,
        f"--batch {problem.work} --nodes {problem.nodes} --pending {problem.pending}",
        f"--dtype {problem.in_dtype} --state-dtype {problem.state_dtype}",
    ]
    return " ".join(words)


def gap_line(problem: Specialisation, gpu: str, waiting: int) -> str:
    """Return why a call of ``problem`` takes the analytic default on ``gpu``.

    Args:
        problem: of the call.
        gpu: key of the GPU.
        waiting: entries that could serve it, but were not checked there yet.
    """
    if waiting:
        await_ = "1 entry that awaits" if waiting == 1 else f"{waiting} entries that await"
        return (
            f"tables have {await_} a check by warmup() here before serving {problem.key()} on {gpu}; until then the "
            "analytic default is used"
        )
    return f"no table has an entry for {problem.key()} on {gpu}; the analytic default is used"


def work_of(problem: Problem) -> int:
    """Return the work bucket of :func:`geometry`, equal to ``problem.work`` except for a group above it."""
    _, hv, batch = geometry(problem)
    return work_bucket(batch, hv)
