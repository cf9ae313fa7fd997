"""Write chat settings to the files of a Hugging Face folder: the chat template, and all tokens that end a turn.

The template is in chat_template.jinja for transformers, and in tokenizer_config.json for older programs. `generate`
stops at `eos_token_id` of generation_config.json; other programs stop at `eos_token_id` of config.json. This module
does not depend on the content of templates or on weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mega.core.checkpoint.forms.foreign import read_json
from mega.core.checkpoint.forms.form import TOKEN_IDS, SpecialTokens
from mega.core.checkpoint.own.source import StoredWeights
from mega.core.untrusted import Json

TEMPLATE, GENERATION, TOKENIZER = "chat_template.jinja", "generation_config.json", "tokenizer_config.json"
END = "eos_token_id"
SAMPLING = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "num_beams", "max_length", "max_new_tokens"),
    *("min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "length_penalty", "bad_words_ids"),
    *("begin_suppress_tokens", "suppress_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id"),
)
"""Settings in generation_config.json that change what transformers generates."""


def trained(checkpoint: StoredWeights) -> bool:
    """Whether a mega run has trained the weights. If not, the chat settings of an imported model are exported
    unchanged."""
    return checkpoint.step > 0


def with_ends(config: Mapping[str, Json], ends: Iterable[int]) -> dict[str, Json]:
    """Add the ids `ends` to eos_token_id in the content of a config.json or generation_config.json. The value of
    eos_token_id is one id or a list of ids."""
    current = config.get(END)
    first = current if isinstance(current, list) else [] if current is None else [current]
    ids = list(dict.fromkeys([*ends, *first]))
    return {**config, END: ids[0] if len(ids) == 1 else ids} if ids else dict(config)


def written_files(
    checkpoint: StoredWeights, config: Mapping[str, Json], tokens: SpecialTokens
) -> tuple[dict[str, dict[str, Json]], dict[str, bytes]]:
    """Return the files of an export, except config.json, as two dicts by file name: (JSON files, other files). These
    files replace files of the same name that are stored with the checkpoint. config: the exported config.json."""
    carried = checkpoint.attachments
    generation = {"_from_model_config": True, **{key: config[key] for key in TOKEN_IDS if key in config}}
    files = {GENERATION: generation, **{name: dict(content) for name, content in tokens.files.items()}}
    files = {name: content for name, content in files.items() if name not in carried}
    if tokens.template is None or not trained(checkpoint):
        return files, {}
    files[GENERATION] = with_ends(_carried(carried, GENERATION) or generation, tokens.ends)
    files[TOKENIZER] = tokenizer_config(carried, tokens)
    return files, {TEMPLATE: tokens.template.encode()}


def tokenizer_config(carried: Mapping[str, Path], tokens: SpecialTokens) -> dict[str, Json]:
    """Return tokenizer_config.json with the template, and with the special tokens that a template may use."""
    config = _carried(carried, TOKENIZER) or dict(tokens.files.get(TOKENIZER, {}))
    others = config.get("extra_special_tokens")
    known = {key for key in config if config[key] is not None} | set(others if isinstance(others, dict) else ())
    token_names = {key: name for key, name in tokens.names.items() if key not in known}
    # A null stays, because it takes away a token that transformers' class would have by default
    return {**config, **token_names, "chat_template": tokens.template}


def _carried(files: Mapping[str, Path], name: str) -> dict[str, Json]:
    return read_json(files[name]) if name in files else {}


def generation_losses(checkpoint: StoredWeights, *, ends: bool = False) -> tuple[str, ...]:
    """Return a message about the settings of generation_config.json that a format without this file lacks. ends:
    whether the format also has no place for several tokens that end a text."""
    settings = _carried(checkpoint.attachments, GENERATION)
    keys = (*((END,) if ends and isinstance(settings.get(END), list) else ()), *SAMPLING)
    named = [f"{key} {settings[key]}" for key in keys if settings.get(key) is not None]
    return (f"the export has no place for settings of {GENERATION}: {', '.join(named)}",) if named else ()
