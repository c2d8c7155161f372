"""Agents that act in environments: the sampler's protocol, and the loop from turn to turn."""
