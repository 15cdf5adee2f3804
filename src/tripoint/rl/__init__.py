"""Reinforcement learning with two stacks: `tripoint train`, GRPO runs whose trainer and engine round as an arm says."""
