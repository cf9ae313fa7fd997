"""What is told of a run while it runs, and to whom. It knows no ranks, and nothing of how a run trains.

meters     a row a step into a file, log lines, a bar on a terminal
trackers   services that keep them: Weights & Biases, MLflow
exporter   Prometheus at /metrics, and /health
profiling  torch's profiler over some steps
output     lines on stdout, which may break
"""
