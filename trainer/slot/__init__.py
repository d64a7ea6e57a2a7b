"""Owns the process of a rank: starts, watches, kills and reaps it, and holds its snapshots.

It decides nothing and never imports JAX. Ray makes an actor of it, and is needed only to leave.
"""
