"""Optimizers, which compute new weights from reduced gradients. This package does not depend on the model.

optimizer, rule   updates this rank's span of each bucket with an update rule; choose: creates the rule from options
adam, adafactor, lamb, muon, sgd   the update rules
scaler            the loss scale of fp16; schedule: learning rate and weight decay as functions of consumed samples
"""
