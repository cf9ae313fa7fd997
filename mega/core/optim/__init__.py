"""The update: from reduced gradients to new weights. Knows no model.

optimizer, rule   bucket by bucket, by a rule that moves this rank's spans; choose: which one the options ask for
adam, adafactor, lamb, muon, sgd   the rules
scaler            the loss scale of fp16; schedule: learning rate and weight decay by samples
"""
