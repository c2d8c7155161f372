"""Networks and checkpoints."""
