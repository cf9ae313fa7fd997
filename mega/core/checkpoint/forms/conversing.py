"""How a model converses, in the files of a Hugging Face folder: its chat template, and all tokens that end a turn.

transformers reads the template from chat_template.jinja, older programs from tokenizer_config.json; `generate` stops at
`eos_token_id` of generation_config.json, other programs read that of config.json. Knows neither templates nor weights.
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


def trained(checkpoint: StoredWeights) -> bool:
    """Whether a mega run has changed the weights. What an imported model declares is exported unchanged."""
    return checkpoint.step > 0


def with_ends(config: Mapping[str, Json], ends: Iterable[int]) -> dict[str, Json]:
    """A config.json or generation_config.json with all of `ends` among its ends: a number, or a list of several."""
    known = config.get(END)
    first = known if isinstance(known, list) else [] if known is None else [known]
    every = list(dict.fromkeys([*ends, *first]))
    return {**config, END: every[0] if len(every) == 1 else every} if every else dict(config)


def written_files(
    checkpoint: StoredWeights, config: Mapping[str, Json], tokens: SpecialTokens
) -> tuple[dict[str, dict[str, Json]], dict[str, bytes]]:
    """The JSON files other than config.json that an export has to write, and other files; they go before those that the
    checkpoint carries. config: the config.json of the export."""
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
    """tokenizer_config.json with the template, and with the names of tokens that a template may ask for."""
    config = _carried(carried, TOKENIZER) or dict(tokens.files.get(TOKENIZER, {}))
    named = {key: name for key, name in tokens.names.items() if config.get(key) is None}
    return {
        **named,
        **{key: value for key, value in config.items() if value is not None},
        "chat_template": tokens.template,
    }


def _carried(files: Mapping[str, Path], name: str) -> dict[str, Json]:
    return read_json(files[name]) if name in files else {}
