"""1,797 real handwritten digits of 8 x 8 pixels, from scikit-learn: no download.

A module of your own beside the settings file: the tasks here import it like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

Rows = dict[str, NDArray[Any]]

HELD_OUT = 288


class Digits:
    """The rows of each batch, by seed and step alone: every epoch is a new order of all digits."""

    def __init__(self, *, seed: int, batch_size: int) -> None:
        images, labels = load_digits(return_X_y=True)
        images = (images / 16.0).astype(np.float32)
        order = np.random.default_rng(0).permutation(len(images))
        held_out, train = order[:HELD_OUT], order[HELD_OUT:]
        self.train: Rows = {"image": images[train], "label": labels[train].astype(np.int32)}
        self.held_out: Rows = {
            "image": images[held_out],
            "label": labels[held_out].astype(np.int32),
        }
        self._seed, self._batch_size = seed, batch_size
        self.steps_an_epoch = len(train) // batch_size

    def batch(self, step: int, rows: slice) -> Rows:
        """Some rows of the global batch of a step."""
        epoch, place = divmod(step, self.steps_an_epoch)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self.train["label"]))
        chosen = order[place * self._batch_size :][: self._batch_size][rows]
        return {name: values[chosen] for name, values in self.train.items()}

    def held_out_batch(self, index: int, rows: slice) -> Rows:
        """Some rows of a held-out batch; `HELD_OUT` / `batch_size` of them are all there is."""
        start = index * self._batch_size % HELD_OUT
        return {
            name: values[start : start + self._batch_size][rows]
            for name, values in self.held_out.items()
        }
