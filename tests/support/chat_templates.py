# ruff: noqa: E501, RUF001  (templates are one line, with signs of their own, in their families too)
"""Chat templates in the styles of published families, written for these tests; conversations; small tokenizers.

`«` and `»` stand around what the assistant says with its end: `{% generation %}` and `{% endgeneration %}` in the
tagged form of a template, nothing in the other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Folder = Callable[[Path], None]

TEMPLATES: dict[str, str] = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m.role == 'assistant' %}«{{ m['content'] }}<|im_end|>»
{% else %}{{ m['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "chatml-default-system": """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}«{{ m.content }}<|im_end|>»{% else %}{{ m.content }}<|im_end|>{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "chatml-trim": """{%- for m in messages -%}
<|im_start|>{{ m.role }}{{ '\\n' }}{% if m.role == 'assistant' %}«{{ m.content | trim }}<|im_end|>»{% else %}{{ m.content | trim }}<|im_end|>{% endif %}{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}""",
    "qwen-tools": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}«
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}»{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "qwen-thinking": """{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == 'user' %}{%- set ns.looking = false %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}«
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {{- '<|im_end|>' }}»{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "always-thinks": """{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}<|im_start|>assistant
«{{ content.strip() }}<|im_end|>»
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% if message.role == 'assistant' %}«{{ message['content'] | trim + '<|eot_id|>' }}»{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "llama3-tools": """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}
{%- if tools is not none %}
    {{- 'You have these functions:\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message.role == 'assistant' %}«{{- message['content'] | trim + '<|eot_id|>' }}»
        {%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}«
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}»
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}{{- message.content }}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}«{{ ' ' + content.strip() + ' ' + eos_token }}»{% endif %}{% endfor %}""",
    "mistral": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}«{{ message['content'] + eos_token }}»{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "mistral-tools": """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {%- if loop.last and messages[0].role == 'system' %}{{- '[INST] ' + messages[0].content + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}«
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
        {{- ']' + eos_token }}»
    {%- elif message.role == 'assistant' %}«{{- ' ' + message.content + eos_token }}»
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}""",
    "mistral-system": """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]{% elif message.role == 'user' %}[INST]{{ message.content }}[/INST]{% elif message.role == 'assistant' %}«{{ message.content }}{{ eos_token }}»{% endif %}{% endfor %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}«{{ message['content'] | trim + '<end_of_turn>' }}»{{ '\\n' }}{% else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "phi3": """{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}«{{ message['content'] + '<|end|>' }}»{{ '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "role-in-token": """{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message.role == 'assistant' %}«{{ message['content'] + '<|end|>' }}»{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}«{{ message['content'] + eos_token }}»
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "vicuna": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{{ messages[0].content + ' ' }}{% else %}{% set loop_messages = messages %}{% endif %}{% for message in loop_messages %}{% if message.role == 'user' %}{{ 'USER: ' + message.content.strip() + ' ' }}{% else %}{{ 'ASSISTANT:' }}«{{ ' ' + message.content.strip() + eos_token }}»{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
    "alpaca": """{% for message in messages %}{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}{% elif message.role == 'user' %}### Instruction:
{{ message.content }}

### Response:
{% elif message.role == 'assistant' %}«{{ message.content }}{{ eos_token }}»

{% endif %}{% endfor %}""",
    "deepseek-text": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant:' }}«{{ ' ' + message['content'] + eos_token }}»{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
    "full-width": """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% elif message.role == 'assistant' %}{{ '<｜Assistant｜>' }}«{{ message.content + '<｜end▁of▁sentence｜>' }}»{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    "full-width-thinking": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>'}}«{{ content + '<｜end▁of▁sentence｜>'}}»{%- endif %}{%- endfor -%}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}""",
    "full-width-tools": """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% elif message.role == 'assistant' %}{{ '<｜Assistant｜>' }}«{{ message.content or '' }}{% for call in message.tool_calls or [] %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}{{ eos_token }}»{% elif message.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜>' + message.content + '<｜tool▁outputs▁end｜>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}{# {{ tools }} #}""",
    "command": """{{ bos_token }}{% for message in messages %}{% set name = {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[message.role] %}{{ '<|START_OF_TURN_TOKEN|>' + name }}{% if message.role == 'assistant' %}«{{ message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}»{% else %}{{ message.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    "openchat": """{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ':' }}{% if message.role == 'assistant' %}«{{ ' ' + message['content'] + '<|end_of_turn|>' }}»{% else %}{{ ' ' + message['content'] + '<|end_of_turn|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}""",
    "tulu": """{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}«{{ message['content'] + eos_token }}»{{ '\\n' }}{% elif message.role == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}""",
    "granite": """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set system_message = 'You are a model.' %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in loop_messages %}
{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}
{%- if message.role == 'assistant' %}«{{ message['content'] + '<|end_of_text|>' }}»{% else %}{{ message['content'] + '<|end_of_text|>' }}{% endif %}
{{- '\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
{%- endfor %}""",
    "exaone": """{% for message in messages %}{% if loop.first and message.role != 'system' %}{{ '[|system|][|endofturn|]\\n' }}{% endif %}{{ '[|' + message.role + '|]' }}{% if message.role == 'user' %}{{ message.content + '\\n' }}{% elif message.role == 'assistant' %}«{{ message.content + '[|endofturn|]' }}»{{ '\\n' }}{% else %}{{ message.content + '[|endofturn|]\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}""",
    "glm": """[gMASK]<sop>{% for item in messages %}{% if item.role == 'system' %}<|system|>
{{ item.content }}{% elif item.role == 'user' %}<|user|>
{{ item.content }}{% elif item.role == 'assistant' %}<|assistant|>
«{{ item.content }}<|user|>»{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "solar": """{% for message in messages %}{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}{% elif message.role == 'user' %}{{ '### User:\\n' + message.content + '\\n\\n' }}{% elif message.role == 'assistant' %}{{ '### Assistant:\\n' }}«{{ message.content + eos_token }}»{{ '\\n\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}""",
    "baichuan": """{% for message in messages %}{% if message.role == 'user' %}{{ '<reserved_106>' + message.content + '<reserved_107>' }}{% elif message.role == 'assistant' %}«{{ message.content + eos_token }}»{% else %}{{ message.content }}{% endif %}{% endfor %}""",
    "minicpm": """{% for message in messages %}{% if message.role == 'user' %}{{ '<用户>' + message.content.strip() + '<AI>' }}{% elif message.role == 'assistant' %}«{{ message.content.strip() + eos_token }}»{% else %}{{ message.content.strip() }}{% endif %}{% endfor %}""",
    "internlm": """{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}«{{ message.content + '<|im_end|>' }}»{{ '\\n' }}{% else %}{{ message.content + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "hermes-tools": """{%- macro signature(tool) -%}{{ tool.function.name }}({% for name, what in tool.function.parameters.properties.items() %}{{ name }}: {{ what.type }}{% if not loop.last %}, {% endif %}{% endfor %}){%- endmacro -%}
{{ bos_token }}{% if tools %}{{ '<|im_start|>system\\nFunctions:' }}{% for tool in tools %} {{ signature(tool) }};{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}«{% if message.content is defined and message.content %}{{ message.content }}{% endif %}{% if message.tool_calls %}{{ message.tool_calls | tojson(sort_keys=true) }}{% endif %}<|im_end|>»
{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "reads-content": """{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content | length }} {{ 'long' if m.content | length > 12 else 'short' }}{% if 'the' in m.content %} the{% endif %}
{% if m.role == 'assistant' %}«{{ m.content | replace('\\n', ' ') }}<|im_end|>»
{% else %}{{ m.content | tojson }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}""",
    "loop-controls": """{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{% if not m.content %}{% continue %}{% endif %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}«{{ m.content }}<|im_end|>»
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "today": """<|im_start|>system
{% if strftime_now is defined %}Today is {{ strftime_now('%d %B %Y') }}.{% endif %}<|im_end|>
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}«{{ m.content }}<|im_end|>»
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "undefined": """{{ nothing }}{% if date_string %}{{ date_string }}{% endif %}{% if builtin_tools is defined or tools is not none %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.nothing }}
{% if m.role == 'assistant' %}«{{ m.content }}{{ m.tool_calls }}<|im_end|>»
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "harmony": """<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant«{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}»{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}""",
    "named-roles": """{% set names = dict(system='System', user='Human', assistant='Model', tool='Tool') %}{% for m in messages %}<|im_start|>{{ names[m.role] }}{% if m.name %} ({{ m.name }}){% endif %}
{% if m.role == 'assistant' %}«{{ m.content }}<|im_end|>»
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>Model
{% endif %}""",
    "numbered": """{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.turn = ns.turn + 1 %}[Round {{ ns.turn }}]

Ask: {{ m.content }}

Answer:{% elif m.role == 'assistant' %}«{{ ' ' ~ m.content ~ eos_token }}»

{% else %}{{ m.content }}

{% endif %}{% endfor %}""",
    "start-of-line": """    {% for m in messages %}
    {% if m.role == 'assistant' %}
<|assistant|>«{{ m.content }}</s>»
    {% else %}
<|user|>{{ m.content }}</s>
    {% endif %}
    {% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "ends-last-only": """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
«{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}»
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "ends-last-only-inst": """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}«{{ m.content }}{% if loop.last %}{{ eos_token }}{% endif %}»{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}""",
}

ENDS_LAST_ONLY = ("ends-last-only", "ends-last-only-inst")
"""Templates that leave the assistant's earlier turns without an end: conversations of several turns are refused."""


def untagged(name: str) -> str:
    return TEMPLATES[name].replace("«", "").replace("»", "")


def tagged(name: str) -> str:
    """`-` next to a tag would take blanks away, so the tags are put without."""
    return TEMPLATES[name].replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


_LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <there> & now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
_CALL: dict[str, Any] = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}


def _talk(*texts: str, system: str | None = None) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *turns]}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": _talk("What is the capital of France?", "Paris."),
    "system": _talk("Say hello to the world", "Hello, world!", system="Be brief, and be the best."),
    "turns": _talk("1 + 1?", "2", "And 2 + 2?", "4, of course.", "Thanks", "You are welcome."),
    "system-turns": _talk("Name a fruit", "Apple", "Another", "Pear", system="Answer in one word."),
    "unicode": _talk("Wie heißt „naïve“ auf 日本語?", "ナイーブ 🙂 é", "Привет", "مرحبا — 你好"),
    "lines": _talk("First line\nsecond line\n\nfourth", "def f(x):\n    return x\n", "ok\n", "Done.\n\nBye"),
    "blanks": _talk(" led by a blank", "trailed by one ", "\n both \n", " both "),
    "thinking": _talk(
        "Is 7 prime?", "<think>\n7 has no divisors.\n</think>\n\nYes.", "And 8?", "<think>\n8 = 2 * 4\n</think>\n\nNo."
    ),
    "reasoning": {
        "messages": [
            {"role": "user", "content": "Is 9 prime?"},
            {"role": "assistant", "content": "No.", "reasoning_content": "9 = 3 * 3"},
        ]
    },
    "tools": {
        "tools": [_LOOK],
        "messages": [
            {"role": "user", "content": "Is it raining in Zürich?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "weather", "content": '{"rain": true}'},
            {"role": "assistant", "content": "Yes, it is."},
        ],
    },
    "tools-system": {
        "tools": [_LOOK],
        "messages": [
            {"role": "system", "content": "You may call functions."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello! Where are you?"},
            {"role": "user", "content": "In Bern"},
            {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]},
            {"role": "tool", "name": "weather", "content": "sunny"},
            {"role": "assistant", "content": "Sunny!"},
        ],
    },
    "long": _talk(*(f"turn {i} of the long talk, with the number {i * 37} in it" for i in range(10))),
    "short": _talk("a", "b", "<", "[", "|", "="),
}

CONTROLS = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *(
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|user|>",
        "<|system|>",
    ),
    *("<|assistant|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>"),
    *(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<|START_OF_TURN_TOKEN|>",
    ),
    *("<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|end_of_turn|>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "[|system|]", "[|user|]", "[|assistant|]"),
    *("[|endofturn|]", "[gMASK]", "<sop>", "<reserved_106>", "<reserved_107>", "<用户>", "<AI>", "<|start|>"),
    *("<|message|>", "<|channel|>", "<|return|>"),
)
"""The control tokens of all templates."""
VOCABULARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special."""

CORPUS = [json.dumps(talk, ensure_ascii=False) for talk in CONVERSATIONS.values()] * 3 + [
    "The cat sat on the mat. The dog did not.",
    "def f(x):\n    return  x + 1",
    "Äpfel, 12 and é: naïve façade",
] * 20


def _save(folder: Path, library: Any, **config: Any) -> None:
    from tokenizers import AddedToken

    named = [config[key] for key in ("bos_token", "eos_token", "unk_token") if config.get(key)]
    library.add_special_tokens([AddedToken(name, normalized=False) for name in dict.fromkeys([*named, *CONTROLS])])
    library.add_tokens([AddedToken(name, normalized=False) for name in VOCABULARY])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))


def byte_level(folder: Path, trim: bool = False) -> None:
    """As Qwen's: NFC, a pattern for words, bytes as letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    library.normalizer = normalizers.NFC()
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), bytewise])
    library.decoder, library.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    _save(folder, library, bos_token=None, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def trimming(folder: Path) -> None:
    """As Llama 3's: a token's characters are counted without the blanks that it begins with; a bos in front."""
    from tokenizers import Tokenizer, processors

    byte_level(folder, trim=True)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["<|begin_of_text|>"])
    bos = ("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))
    lead = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[bos])
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), lead])
    _save(folder, library, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def gpt2_like(folder: Path) -> None:
    """GPT-2's own pattern, the file's class of transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    end = "<|endoftext|>"
    _save(folder, library, tokenizer_class="GPT2Tokenizer", bos_token=end, eos_token=end, unk_token=end)


def metaspace(folder: Path, **config: Any) -> None:
    """As Llama 2's in tokenizer.json: a blank in front by the normaliser, bytes for what is unknown."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=pieces, show_progress=False, limit_alphabet=80)
    library.train_from_iterator(CORPUS, trainer)
    whole = json.loads(library.to_str())
    whole["added_tokens"] = [each for each in whole["added_tokens"] if each["id"] < 3]
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _save(folder, Tokenizer.from_str(json.dumps(whole)), **{**named, **config})


def unigram(folder: Path) -> None:
    """As T5's and others': a language model over pieces, blanks as marks."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    library = Tokenizer(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    library.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    _save(folder, library, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def sentencepiece(model: Path, added: bool = True, **config: Any) -> Folder:
    """A tokenizer.model with Hugging Face's older files next to it."""

    def make(folder: Path) -> None:
        import sentencepiece as library

        shutil.copy(model, folder / "tokenizer.model")
        (folder / "tokenizer.model").chmod(0o644)
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        whole = {"tokenizer_class": "LlamaTokenizer", **named, **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(whole))
        others = {"additional_special_tokens": list(CONTROLS)} if added else {}
        (folder / "special_tokens_map.json").write_text(json.dumps({**named, **others}))
        size = library.SentencePieceProcessor(model_file=str(model)).vocab_size()
        if added:
            table = {name: size + number for number, name in enumerate((*CONTROLS, *VOCABULARY))}
            (folder / "added_tokens.json").write_text(json.dumps(table))

    return make


SMALL: dict[str, Folder] = {
    "byte-level": byte_level,
    "trimming": trimming,
    "gpt2": gpt2_like,
    "metaspace": metaspace,
    "llama": lambda folder: metaspace(folder, tokenizer_class="LlamaTokenizer"),
    "llama-legacy": lambda folder: metaspace(folder, tokenizer_class="LlamaTokenizerFast", legacy=True),
    "unigram": unigram,
}
"""Name -> writes a tokenizer of that family into a folder, trained on the conversations."""
