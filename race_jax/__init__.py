"""race-jax: agents that think only when thinking pays."""
