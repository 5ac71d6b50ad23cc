"""What stands in for a library that ends its process, or does not end."""

from __future__ import annotations

import os
import signal
import time

from tests.fuzz.judging import Outcome
from tests.fuzz.recipe import Recipe


class Unwell:
    """Judges recipes of two layers by dying, of three by never ending."""

    def __init__(self, recipe: Recipe) -> None:
        self._layers, self._heads = recipe.layers, recipe.heads

    def prepare(self) -> None:
        """Runs nothing; without heads it dies here."""
        if not self._heads:
            os.kill(os.getpid(), signal.SIGFPE)

    def outcome(self, level: str) -> Outcome:
        """An outcome, or none."""
        if level == "sites" and self._layers == 2:
            os.kill(os.getpid(), signal.SIGFPE)
        if level == "sites" and self._layers == 3:
            time.sleep(600)
        return Outcome("fused")
