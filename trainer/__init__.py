"""The JAX side of everstep. It never imports the supervisor."""
