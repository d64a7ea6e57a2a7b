"""Faces people: answers to commands, the live picture, and what a start would find missing.

It asks, shows and passes orders on. It decides nothing, and the daemon works without it.
"""
