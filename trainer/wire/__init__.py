"""What both sides speak: heartbeats, specs, faults and addresses; plain data, read strictly.

It imports neither JAX nor Ray and takes no action: only what crosses between processes is here.
"""
