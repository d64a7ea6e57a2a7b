"""JAX: the mesh, the compiled programs, and the transfer of arrays between host and devices.

It knows nothing of failures, generations, or where state is kept.
"""
