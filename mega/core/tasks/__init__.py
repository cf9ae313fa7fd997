"""Benchmarks, which score a trained model. The losses that training minimises are in training/kinds.

task.py        the interface of a benchmark, and how it is scored in any layout
options.py     options of mega eval, and the list of benchmarks
benchmarks/    one benchmark per file
score.py       the likelihood of each token of a text
labels.py      scores a classifier on labelled sets (data/formats); ensemble.py: the mean of several models' predictions
rows.py        rows of ids with a scored part; windows of a long text
model.py       checks and opens the model of an evaluation, on every rank
evaluate.py    runs one benchmark on one model, and resumes it; show.py reports the result
harness.py     runs lm-eval's tasks; continuation.py generates text for them; chat.py formats conversations;
               stored_answers.py stores their answers, so that a killed run can resume
toxicity.py    the toxicity of generated continuations
"""
