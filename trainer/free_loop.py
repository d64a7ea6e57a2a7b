"""A training loop of the user's own: the `Worker` that it is called with, to be named in its code.

This place is public; the loop itself is in `trainer.training.free_loop`.
"""

from trainer.training.free_loop import Worker

__all__ = ["Worker"]
