"""Reports from the files of a run or an evaluation: pages, curves, and an account of the run's time. This package does
not import torch.

read      reads the files of a run; corpus: shows the steps of a corpus
page      one self-contained page of HTML
chart     curves as SVG
goodput   an account of a run's time
plot      metrics of several runs, on a terminal or as PNG
lr_find   a sweep over learning rates: the curve, and the suggested rate
"""
