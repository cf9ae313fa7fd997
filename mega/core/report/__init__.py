"""Reports from the files of a run or an evaluation: pages, curves, and a breakdown of how the run spent its time. This
package does not import torch.

read      reads the files of a run; corpus: shows the steps of a corpus
page      one self-contained page of HTML
chart     curves as SVG
goodput   a breakdown of how a run spent its time
plot      metrics of several runs, on a terminal or as PNG
lr_find   a sweep over learning rates: the curve, and the suggested rate
"""
