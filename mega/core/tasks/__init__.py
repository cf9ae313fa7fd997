"""What scores a model: benchmarks, one file each. task.py holds what a benchmark is and how any of them is run."""
