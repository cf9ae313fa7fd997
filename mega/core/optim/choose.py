"""Creates the update rule that the options select."""

from __future__ import annotations

import torch

from mega.core.config.sections import OptimizerConfig
from mega.core.optim.adafactor import Adafactor
from mega.core.optim.adam import AdamW
from mega.core.optim.lamb import LAMB
from mega.core.optim.muon import Muon
from mega.core.optim.rule import Rule
from mega.core.optim.sgd import SGD


def rule_of(options: OptimizerConfig, *, plain: bool = False) -> Rule:
    """Return the update rule selected by `options`. plain: whether AdamW uses unfused operations."""
    adam = AdamW(options.adam_beta1, options.adam_beta2, options.adam_eps, plain)
    if options.optimizer == "adam":
        return adam
    if options.optimizer == "lamb":
        return LAMB(adam)
    if options.optimizer == "sgd":
        return SGD(options.sgd_momentum)
    if options.optimizer == "muon":
        return Muon(
            adam,
            momentum=options.muon_momentum,
            nesterov=options.muon_nesterov,
            coefficients=options.muon_coefficients,
            steps=options.muon_steps,
            scale=options.muon_scale,
            factor=options.muon_factor,
            dtype=torch.float32 if options.muon_dtype == "fp32" else torch.bfloat16,
        )
    return Adafactor(options.adafactor_decay, options.adafactor_clip, options.adafactor_relative)
