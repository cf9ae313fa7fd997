"""Measurements of the speed of mega and of the hardware.

training, rows    times and profiles a training step; the named rows (benchmark runs), and result files
calibrate, curves measures this machine, as input of the estimate; times of single operations
preflight         checks before a run that all hosts of a fleet are equal and fast
serving, load     measures an engine or a server under load; generates requests and records times
simulated         predicts these times, with the engine's scheduler on a simulated clock
options           the sections of `mega bench` and `mega preflight`
"""
