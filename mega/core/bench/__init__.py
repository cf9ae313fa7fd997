"""Measurements: the speed of mega, and of the hardware.

training, rows    times and profiles a training step; the named rows, and files of results
calibrate         measures this machine, for the estimate
preflight         checks that the hosts of a fleet are alike and fast before a run is started
serving, load     an engine or a server under load; arrival of requests, and their timing
options           the sections of `mega bench` and `mega preflight`
"""
