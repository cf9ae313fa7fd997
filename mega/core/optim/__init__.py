"""Optimizers: from reduced gradients to new weights. Knows no model.

optimizer, rule   updates each bucket by an update rule on this rank's span; choose: from the options to the rule
adam, adafactor, lamb, muon, sgd   the rules
scaler            the loss scale of fp16; schedule: learning rate and weight decay by samples
"""
