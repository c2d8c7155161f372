"""CARL: reinforcement learning on rollout trees, with updates where choices matter."""
