"""Tests that all layouts compute the same model, and that a converted model computes what its original computes.

parity, layouts, rows     comparison of layouts; the layouts; one row of results for each
logits                    a converted model against the original program
options                   the section of `mega parity`
"""
