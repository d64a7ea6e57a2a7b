"""Drives the steps of a task, or of a loop of the user's own, and does what is between two steps.

It knows nothing of slots, orders, Ray or Redis: its caller says when to save and when to stop.
"""
