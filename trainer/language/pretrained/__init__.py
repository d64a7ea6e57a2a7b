"""Models that others trained: read from files, checked before anything is loaded, and written.

Nothing here computes with a model, and nothing imports jax.
"""
