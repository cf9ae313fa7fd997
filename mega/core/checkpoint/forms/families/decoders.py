"""All families of decoders, and the choice of a family for exporting a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mega.core.architecture import architecture
from mega.core.checkpoint.forms.families import gemma, llama, mixtures, olmo
from mega.core.checkpoint.forms.families.family import HubFamily
from mega.core.checkpoint.forms.families.gpt2 import gpt2
from mega.core.checkpoint.forms.families.gpt_neox import gpt_neox
from mega.core.checkpoint.forms.families.gptj import gptj
from mega.core.checkpoint.forms.families.granite import granite
from mega.core.checkpoint.forms.families.phi3 import phi3
from mega.core.checkpoint.forms.families.smollm3 import smollm3
from mega.core.checkpoint.forms.families.stablelm import stablelm
from mega.core.checkpoint.forms.families.starcoder2 import starcoder2
from mega.core.checkpoint.own.pieces import CheckpointError
from mega.core.config.sections import ModelConfig
from mega.core.untrusted import Json

DECODERS: tuple[HubFamily, ...] = (
    gpt2,
    *llama.FAMILIES,
    smollm3,
    granite,
    *olmo.FAMILIES,
    *gemma.FAMILIES,
    phi3,
    starcoder2,
    stablelm,
    gpt_neox,
    gptj,
    *mixtures.FAMILIES,
)
"""All families, in the order in which they are tried for a model."""

BY_TYPE: Mapping[str, HubFamily] = {family.model_type: family for family in DECODERS}


def model_from_config(config: Mapping[str, object], where: str, names: Collection[str] = ()) -> ModelConfig:
    """Return the model section that a config.json of any family describes. Errors: CheckpointError naming a key that is
    unknown, or whose value is not supported."""
    return family_in(config, where).model_from_config(config, where, names)


def family_in(config: Mapping[str, object], where: str) -> HubFamily:
    """Return the family that a config.json names. Errors: CheckpointError if it names no family of this table."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        raise CheckpointError(f"{where}: model_type {kind!r} (valid: {', '.join(BY_TYPE)})")
    return BY_TYPE[kind]


def config_from_model(options: ModelConfig, dtype: str) -> dict[str, Json]:
    """Return the config.json of the first family that can express a model. Errors: as for `family_of`."""
    return family_of(options).config_from_model(options, dtype)


def family_of(options: ModelConfig, first: object = None) -> HubFamily:
    """Return the first family that can express a model. first: the `model_type` to try before all others.

    Errors: CheckpointError naming an option that the most similar family does not support.
    """
    nearest = gpt2 if architecture(options).input.learned_positions else llama.llama
    if options.experts:
        nearest = mixtures.mixtral if options.shared_ffn is None else mixtures.qwen2_moe
    faults: dict[str, CheckpointError] = {}
    for family in (*filter(None, [BY_TYPE.get(str(first))]), *DECODERS):
        try:
            family.config_from_model(options, "float32")
        except CheckpointError as error:
            faults[family.model_type] = error
        else:
            return family
    raise faults[nearest.model_type]
