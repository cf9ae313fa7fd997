"""A run or an evaluation as pictures, without torch.

read      what a page is made of; corpus: the steps of a corpus
page      one self-contained page of HTML; chart: its curves
plot      metrics of several runs over each other: on a terminal, as SVG or PNG
lr_find   a sweep of learning rates: which one to train with, and its curve
"""
