"""Reinforcement learning with two stacks: what is watched during a run."""
