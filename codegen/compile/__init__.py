"""Offline compilation of rendered kernels for a named GPU, without one."""

from __future__ import annotations

from bole_codegen.compile.offline import CompileError, Resources, compile_offline

__all__ = ["CompileError", "Resources", "compile_offline"]
