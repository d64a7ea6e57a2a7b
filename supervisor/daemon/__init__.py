"""Runs the contract: one event at a time to the machine, its moves to the journal, then the orders.

What happens next is decided in `fsm`; how an order is carried out is known by `cluster`, `health`
and `disk`. It imports neither the console nor jax.
"""
