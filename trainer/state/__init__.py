"""Saves and restores the training state: snapshots in shared memory, checkpoints on disk.

What it reads is verified or refused. Which restore point counts is decided by the daemon.
"""
