"""Optimizers: from reduced gradients to new weights. The package does not depend on the model.

optimizer, rule   updates this rank's span of each bucket by an update rule; choose: from the options to the rule
adam, adafactor, lamb, muon, sgd   the rules
scaler            the loss scale of fp16; schedule: learning rate and weight decay as functions of the samples consumed
"""
