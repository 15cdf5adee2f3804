"""What alignment costs, as ratios: `python -m benchmarks` for the CPU, `python -m benchmarks.gpu` for a GPU."""
