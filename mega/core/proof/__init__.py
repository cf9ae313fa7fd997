"""What measures mega: whether it is right, and how fast it is.

parity, layouts, rows     all layouts are one model; which layouts, and a row for each; logits: against other programs
bench, bench_rows         a training step, timed and taken apart; calibrate: what this machine can do
serving, serving_bench    answers under load
options                   the sections of `mega bench` and `mega parity`
"""
