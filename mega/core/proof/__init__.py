"""Tests that all layouts compute the same model, and that a converted model has the same results as its original.

parity, layouts, rows     comparison of layouts; the layouts; one row of results per layout
logits                    compares a converted model with the original program
options                   the section of `mega parity`
"""
