"""Configurations that render to the same kernels: the first one stands for the others."""

from __future__ import annotations

from bole_codegen.search.space import Identity, Render, identity
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config


class Duplicates:
    """The configurations of a class by what they render to.

    Args:
        problem: representative of the class.
        render: problem and configuration to kernels.
    """

    def __init__(self, problem: Specialisation, render: Render) -> None:
        self._problem = problem
        self._render = render
        self._first: dict[Identity, Config] = {}
        self._alias: dict[Config, Config] = {}
        self._texts: dict[Config, tuple[str, ...]] = {}

    def admit(self, config: Config) -> Config:
        """Return the configuration that stands for the kernels of this one: itself when it is the first.

        Raises:
            Exception: it cannot be rendered.
        """
        found = identity(self._problem, config, self._render)
        self._texts[config] = tuple(text for text, _, _ in found)
        first = self._first.setdefault(found, config)
        if first != config:
            self._alias[config] = first
        return first

    def standing(self, config: Config) -> Config:
        """Return the configuration that stands for one, itself when it was not admitted."""
        return self._alias.get(config, config)

    def others(self) -> dict[Config, list[Config]]:
        """Return the configurations that others stand for."""
        found: dict[Config, list[Config]] = {}
        for other, first in self._alias.items():
            found.setdefault(first, []).append(other)
        return found

    def texts(self, config: Config) -> tuple[str, ...]:
        """Return the text hashes of the kernels of a configuration; none when it does not render."""
        if config not in self._texts:
            try:
                found = identity(self._problem, config, self._render)
            except Exception:  # Then nothing is known about it.
                return ()
            self._texts[config] = tuple(text for text, _, _ in found)
        return self._texts[config]
