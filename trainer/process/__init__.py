"""A rank: the JAX process of one generation, started by its slot as `python -m trainer.process`.

It joins the world, drives the training and reports. It imports neither Ray nor the supervisor.
"""
