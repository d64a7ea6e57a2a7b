"""Suspects: silence becomes a suspicion and, with a second witness, a verdict.

It reads heartbeats and compares times that it is given. It ends nothing and writes no journal.
"""
