"""Chat templates with the habits of each family, written for these tests."""

import functools
import random

import text_models

from agentserve.families import byte_tokenizer
from agentserve.sessions.text import model_text
from agentserve.sessions.toolformat import detect

# One turn is <s>[INST] ...[/INST] ...</s>; tools stand before the last user message, calls are one
# list with nine-character ids, roles must alternate, and a result must follow a call.
MISTRAL_LIST = """
{{- bos_token }}
{%- set state = namespace(turn=0, last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (state.turn % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set state.turn = state.turn + 1 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == state.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids of nine') }}{% endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('unknown role') }}
    {%- endif %}
{%- endfor %}
"""
# The later form: a name, then arguments; system messages anywhere; tools at the start.
MISTRAL = """
{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
    {%- elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
# One call a message, an object with parameters.
LLAMA = """
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{{- bos_token + head('system') }}
{%- if tools %}
    {{- 'Answer with {"name": ..., "parameters": ...}\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ head('ipython') + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""
# Parameters are elements; the prompt opens the reasoning; history keeps it since the last question.
QWEN_CODER = """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n' }}
    {{- '</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set seen.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > seen.question %}
            {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- ('\\n' if m.content or not loop.first else '') + '<tool_call>\\n<function=' }}
            {{- call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
# Messages with headers; a result needs the call before it, and reasoning goes with the answer.
HARMONY = """
{{- '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- for tool in tools %}{{ tool.function.name + (tool.function | tojson) }}{% endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set answered = namespace(yes=false) %}
        {%- for later in messages[loop.index:] %}
            {%- if later.role == 'assistant' and not later.tool_calls %}
                {%- set answered.yes = true %}
            {%- endif %}
        {%- endfor %}
        {%- if m.thinking and not answered.yes %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- set called.name = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if called.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (m.content | tojson) + '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
# Nothing ends a message but the next role.
GLM = """
[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n<tool_call>name\\n<arg_key>key</arg_key>\\n' }}
    {{- '<arg_value>value</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (m.reasoning_content or '') + '</think>' }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
# Arguments are text in a code fence, calls must have null content, reasoning never comes back.
DEEPSEEK = """
{{- bos_token }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- set state = namespace(results=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set state.results = false %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'system' %}{{ m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls and m.content is none %}
        {%- set state.results = false %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in m.tool_calls %}
            {{- ('\\n' if not loop.first else '') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' }}
            {{- call.function.name + '\\n```json\\n' + call.function.arguments }}
            {{- '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if state.results else '<｜Assistant｜>' }}
        {{- m.content + '<｜end▁of▁sentence｜>' }}
        {%- set state.results = false %}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁outputs▁begin｜>' if not state.results }}
        {%- set state.results = true %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if state.results %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not state.results %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""
DEEPSEEK_31 = """
{{- bos_token }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
    {%- elif m.role == 'system' %}{{ m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.previtem.role == 'user' %}{{ '<｜Assistant｜></think>' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments | tojson }}
            {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""
KIMI = """
{%- if tools %}{{ '<|im_system|>tools<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_' + ('system' if m.role in ('system', 'tool') else m.role) + '|>' }}
    {{- (m.name if m.name else m.role) + '<|im_middle|>' }}
    {%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}
    {{- m.content }}
    {%- if m.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
MINIMAX = """
{%- if tools %}{{ '[e~[' + (tools | tojson) + '<minimax:tool_call>...[e~[' }}{% endif %}
{%- for m in messages %}
    {{- ']~b]' + m.role + '\\n' }}
    {%- if m.role == 'tool' %}{{ '<response>' + m.content + '</response>' }}
    {%- else %}{{ m.content }}
    {%- endif %}
    {%- if m.tool_calls %}
        {{- '<minimax:tool_call>\\n' }}
        {%- for call in m.tool_calls %}
            {{- '<invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter name="' + key + '">' }}
                {{- (value if value is string else value | tojson) + '</parameter>\\n' }}
            {%- endfor %}
            {{- '</invoke>\\n' }}
        {%- endfor %}
        {{- '</minimax:tool_call>' }}
    {%- endif %}
    {{- '[e~[' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]assistant\\n' }}{% endif %}
"""
TEMPLATES = {
    "mistral-list": MISTRAL_LIST,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "qwen-coder": QWEN_CODER,
    "harmony": HARMONY,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "deepseek-v3.1": DEEPSEEK_31,
    "kimi": KIMI,
    "minimax": MINIMAX,
}


@functools.cache
def text_of(name):
    """Return the text side of a family: its template here, on a vocabulary of bytes."""
    source = text_models.QWEN3_TEMPLATE if name == "hermes" else TEMPLATES[name]
    tokenizer = byte_tokenizer(source.strip())
    return model_text(
        name, tokenizer, detect(tokenizer.chat_template), check_rate=1.0, source=random.Random(0)
    )


NAMES = ("hermes", *TEMPLATES)
