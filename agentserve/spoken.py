"""Control strings that models say themselves, around reasoning and tool calls.

Vocabularies flag most of them as special, so that a decoder would drop them; here they are output.
Strings that end a turn are not among them: a sampled stop token is never part of the output.
"""

THOUGHT = ("<think>", "</think>", "[THINK]", "[/THINK]")
TAGS = ("<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>")
ELEMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
LLAMA = ("<|python_tag|>",)
MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
SPOKEN = frozenset((*THOUGHT, *TAGS, *ELEMENTS, *LLAMA, *MISTRAL, *HARMONY, *DEEPSEEK, *KIMI))
