"""What the files of a run or an evaluation say afterwards: pages, curves, where the time went. Without torch.

read      what a page is made of; corpus: the steps of a corpus
page      one self-contained page of HTML
chart     curves as SVG, for every picture of curves
goodput   where a run's time went
plot      metrics of several runs over each other: on a terminal or as PNG
lr_find   a sweep of learning rates: which one to train with, and its curve
"""
