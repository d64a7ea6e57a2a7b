"""Remembers: the journal, and what is derived from it or kept beside it for later daemons.

It performs nothing: all rooms above may read here, only the daemon appends.
"""
