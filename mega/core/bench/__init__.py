"""What is measured on machines: mega's speed, and what the hardware reaches.

training, rows    a training step, timed and taken apart; the rows that have a name, and files of figures
calibrate         what this machine can do, for the estimate
preflight         whether the hosts of a fleet are alike and fast, before a run is put on them
serving, load     an engine or a server under load; how requests arrive, and what is timed of them
options           the sections of `mega bench` and `mega preflight`
"""
