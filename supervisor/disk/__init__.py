"""Keeps: the run directory, restore points, incidents, and the other files of a run.

What to keep, to quarantine or to write is decided by effects, not here. It never imports Orbax.
"""
