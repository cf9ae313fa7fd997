"""Benchmarks: what scores a trained model. What is trained on is training/kinds.

task.py        what a benchmark is, and how any of them is run in any layout
options.py     what a user may ask of one
benchmarks/    one file each
score.py       how likely a model holds each token of a text
labels.py      a classifier on labelled sets (data/formats); ensemble.py: several models' predictions as one
rows.py        rows of which some ids are judged, windows of a text
model.py       the model of an evaluation, on every rank
evaluate.py    one benchmark of one model: resumed, reported (show.py)
harness.py     lm-eval's tasks instead; continuation.py: the text that they ask for; chat.py: as conversations; kept.py:
               answers that survive a kill
toxicity.py    how toxic continuations are
"""
