"""Whether all layouts compute one model, and a converted model is its original.

parity, layouts, rows     all layouts are one model; which layouts, and a row for each
logits                    a converted model against the program that it came from
options                   the section of `mega parity`
"""
