"""The daemon that keeps a distributed JAX training job stepping. It never imports jax or orbax."""
