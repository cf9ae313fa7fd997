"""Benchmarks for trained models. (The package training/kinds contains the losses that training minimises.)

task.py        the interface of a benchmark, and how it is scored in any layout
options.py     options of `mega eval`, and the list of benchmarks
benchmarks/    one benchmark per file
score.py       the likelihood of each token of a text
labels.py      scores a classifier on labelled sets (data/formats); ensemble.py: averages several models' predictions
rows.py        rows of ids with a scored part; windows of a long text
model.py       checks and opens the model of an evaluation, on every rank
evaluate.py    runs, or resumes, one benchmark on one model; `show.py` prints the result
harness.py     runs lm-eval's tasks; `continuation.py` generates text for these tasks; `chat.py` formats conversations;
               `stored_answers.py` stores answers, so that a killed run can resume
toxicity.py    measures the toxicity of generated continuations
"""
