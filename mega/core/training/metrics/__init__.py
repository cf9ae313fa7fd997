"""Reports of a run while it trains. This package depends neither on ranks nor on how a run trains.

meters     a file with one row per step, log lines, a progress bar on a terminal
trackers   services that store the numbers: Weights & Biases, MLflow
exporter   Prometheus at /metrics, and /health
profiling  torch's profiler over some steps
output     printing lines to a stdout that may fail
"""
