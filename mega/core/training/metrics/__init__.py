"""Reports of a run while it trains. This package depends neither on ranks nor on how a run trains.

meters     rows of steps, log lines, a progress bar on a terminal
file       the file with the rows
trackers   services that store the metrics: Weights & Biases, MLflow
exporter   Prometheus at /metrics, and /health
profiling  torch's profiler over some steps
output     printing lines to a stdout that may fail
"""
