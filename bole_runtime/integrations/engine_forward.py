"""What the Python of a forward went through: a commit after half a forward would write factors of an earlier round."""

from __future__ import annotations


class ForwardLog:
    """Layers verified and convolved since the trees were set, or since the last commit.

    A graph's replay runs no Python and leaves no trace here. So an empty log means a replay once there was a whole
    forward, and says nothing about what the replay did; a log with some of the layers means a forward that stopped.

    Args:
        layers: of the model.
        parts: convolutions of a layer.
    """

    def __init__(self, layers: int, parts: int) -> None:
        self._layers, self._parts = layers, parts
        self._verified: set[int] = set()
        self._convolved: set[tuple[int, int]] = set()
        self._whole = False

    def clear(self) -> None:
        """A forward begins, or what was seen is committed or abandoned."""
        self._verified.clear()
        self._convolved.clear()

    def verified(self, layer: int) -> None:
        """A layer was verified."""
        self._verified.add(layer)

    def convolved(self, layer: int, part: int) -> None:
        """A convolution of a layer was computed."""
        self._convolved.add((layer, part))

    def check(self, rows: int) -> None:
        """Check that the forward was whole, or a replay.

        Args:
            rows: of the batch, for the message.

        Raises:
            RuntimeError: layers or convolutions are missing.
        """
        if self._whole and not self._verified and not self._convolved:
            return
        for done, of, what in (
            (len(self._verified), self._layers, "layers were verified"),
            (len(self._convolved), self._layers * self._parts, "convolutions were computed"),
        ):
            if done < of:
                raise RuntimeError(
                    f"commit: {done} of {of} {what} with {rows} rows since the trees were set, so what others keep is "
                    "of an earlier round; abandon() forgets a forward that stopped"
                )
        self._whole = True
