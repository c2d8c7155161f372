"""Entry points: what a person runs."""
