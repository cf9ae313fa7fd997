"""Reports from the files of a run or an evaluation: pages, curves, and where the time went. This package does not
import torch.

read      reads the files of a run; corpus: shows the steps of a corpus
page      one self-contained page of HTML
chart     curves as SVG
goodput   where a run's time went
plot      metrics of several runs, on a terminal or as PNG
lr_find   a sweep of learning rates: its curve, and the rate to train with
"""
