"""Check that all layouts compute the same model, and that a converted model has the same outputs as the original.

parity, layouts, rows     compares layouts; the layouts; one row of results per layout
logits                    compares a converted model with transformers
options                   the options of `mega parity`
"""
