"""Provide chat templates as Jinja text: four built-in templates, and templates in model folders. This module does not
render templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mega.core.untrusted import parse_json, read_limited

MODELS_OWN = "model"
"""Value of --chat-template for the template that belongs to the weights."""
SOURCE_BYTES = 1 << 20
"""Maximum size in bytes of a template, and of the text that a template adds to a conversation."""
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Path, in the folder of a chat_template.jinja, of the template for conversations with functions."""
STORED_TOOL_TEMPLATE = TOOL_TEMPLATE.replace("/", ".")
"""Name of the same file in a mega checkpoint, which has no subfolders."""
CONFIG_BYTES = 64 << 20
"""Maximum size in bytes of a tokenizer_config.json, which may contain thousands of added tokens."""

_LLAMA2 = """\
{%- set found = namespace(system='', open=false) -%}
{%- for message in messages -%}
{%- if found.open and message.role != 'user' and message.role != 'assistant' -%}
{{ raise_exception('llama2 has the system turn within the turn of the user after it, and one here has none after it') }}
{%- elif message.role == 'system' -%}
{%- set found.open = true -%}
{%- set found.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{ '<s>[INST] ' + found.system + message.content.strip() + ' [/INST]' }}
{%- set found.open = false -%}
{%- set found.system = '' -%}
{%- elif message.role == 'assistant' -%}
{{ ' ' + message.content.strip() + ' </s>' }}
{%- else -%}
{{ raise_exception('llama2 has turns of system, user and assistant, not of ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if found.open -%}
{{ raise_exception('llama2 has the system turn within the turn of the user after it, and one here has none after it') }}
{%- endif -%}
"""
_LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content.strip() + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""
_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
_PLAIN = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ 'Assistant: ' + message.content.strip() + eos_token }}
{%- else -%}
{{ message.role.capitalize() + ': ' + message.content.strip() + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ 'Assistant:' }}
{%- endif -%}
"""

TEMPLATES: Mapping[str, str] = {"llama2": _LLAMA2, "llama3": _LLAMA3, "chatml": _CHATML, "plain": _PLAIN}
"""Name of a built-in template -> its text in Jinja.

llama2: <s>[INST] <<SYS>> system <</SYS>> user [/INST] assistant </s>, for each turn
llama3: <|begin_of_text|>, then for each turn <|start_header_id|>role<|end_header_id|>, two newlines, text <|eot_id|>
chatml: for each turn <|im_start|>role, newline, text <|im_end|>, newline
plain: "User: text", a blank line between turns, the end of document after the assistant's turns; for any tokenizer
"""


NEEDS: Mapping[str, tuple[str, ...]] = {
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
"""Name of a built-in template -> tokens that the tokenizer must have, because their names would otherwise be encoded as
text."""


def source_of(name: str) -> str:
    """Return the Jinja text of a template, given by name, Jinja file or tokenizer_config.json. Errors: ValueError if
    the template does not exist."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if Path(name).is_file():
        return template_text(name)
    if name == MODELS_OWN:
        raise ValueError(f"--chat-template {name}: belongs to mega finetune, where the weights at --load bring one")
    raise ValueError(f"--chat-template {name}: must be {', '.join(TEMPLATES)}, or a Jinja file")


def template_text(file: str) -> str:
    """Read a Jinja file, or the template in a tokenizer_config.json. A chat_template.jinja is joined with the template
    for functions next to it. Errors: ValueError if a file contains no template or cannot be read."""
    label = f"--chat-template {file}"
    if Path(file).name == "tokenizer_config.json":
        config = parse_json(read_limited(file, CONFIG_BYTES, label), label)
        if isinstance(config, dict) and (text := template_of(config)) is not None:
            return text
        raise ValueError(f'{label}: has no "chat_template"')
    paths = [Path(file)]
    if Path(file).name == "chat_template.jinja":
        tool_files = [Path(file).with_name(STORED_TOOL_TEMPLATE), Path(file).parent / TOOL_TEMPLATE]
        paths += [path for path in tool_files if path.is_file()][:1]
    try:
        sources = [read_limited(path, SOURCE_BYTES, f"--chat-template {path}").decode() for path in paths]
    except UnicodeDecodeError as error:
        raise ValueError(f"{label}: not UTF-8 ({error})") from None
    return joined(*sources)


def joined(default: str, tool_use: str | None = None) -> str:
    """Return one template that renders conversations with functions by `tool_use`, and all others by `default`, as
    transformers chooses between the two."""
    if tool_use in (None, default):
        return default
    branches = [re.sub(r"(\r\n|\r|\n)\Z", "", source) for source in (str(tool_use), default)]  # as Jinja does
    # Jinja removes the line breaks after the blocks, and the blanks before a block at the beginning of a branch
    return "{% if tools is not none %}\n" + "{%+ else %}\n".join(branches) + "{%+ endif %}"


def template_of(config: Mapping[str, object]) -> str | None:
    """Return the template in a tokenizer_config.json. If the file has several templates, return the default one, joined
    with the one for functions."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    if isinstance(template, dict):
        default, tool_use = (template.get(name) for name in ("default", "tool_use"))
        template = joined(default, tool_use) if isinstance(default, str) and isinstance(tool_use, str) else default
    return template if isinstance(template, str) else None
