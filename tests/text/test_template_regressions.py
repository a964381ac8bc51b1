"""Five ways in which templates cost a loop its prefix elsewhere: what is kept and computed here."""

import itertools

import family_templates
import msgspec
import pytest

from agentserve import families
from agentserve.engine.plan import unpack
from agentserve.sessions.compose import Conversation, Message

USER = Message(role="user", text="q")
TOOL = (families._TOOL,)


def answer(text, said, *, calls=True):
    """Return a generated message whose text is `said`, as a model would go on after `USER`."""
    return families.generated(text, (USER,), [("look", {"path": "a"})] if calls else [], said)


def result(call):
    return Message(role="tool", text="found", name=call.name, call_id=call.call_id)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


@pytest.mark.parametrize("name", ["hermes", "qwen-coder", "glm"])
def test_a_line_break_that_the_template_writes_and_the_model_did_not_costs_nothing(name):
    """1: the template puts a line break before the call's tag; kept ids are never rewritten."""
    text = family_templates.text_of(name)
    called = answer(text, "step")
    log = text.composer.tokens(Conversation((USER, called), TOOL), False)
    after = text.composer.tokens(Conversation((USER, called, result(called.calls[0])), TOOL))
    assert after[: len(log)] == log
    assert list(unpack(called.ids)) == log[-len(unpack(called.ids)) :]


def test_history_without_its_reasoning_keeps_everything_before_the_first_reasoning():
    """2: a client or template that drops reasoning costs what follows it, not the whole prompt."""
    text = family_templates.text_of("qwen-coder")
    old = (USER, answer(text, "old", calls=False))
    loop = (*old, USER, answer(text, "new"))
    log = text.composer.tokens(Conversation(loop, TOOL), False)
    dropped = msgspec.structs.replace(loop[-1], ids=None, reasoning="")
    after = text.composer.tokens(
        Conversation((*loop[:-1], dropped, result(loop[-1].calls[0])), TOOL)
    )
    before = text.composer.tokens(Conversation(loop[:-1], TOOL))
    assert common(log, after) >= len(before) - len("<think>\n")


def test_the_canonical_form_of_a_kept_message_is_what_was_generated():
    """3: spaces in a call's JSON that no template would write stay as the model wrote them."""
    text = family_templates.text_of("hermes")
    odd = '<tool_call>\n{ "name":"look","arguments" : {"path":  "a"} }\n</tool_call>'
    ids = text.tokenizer.encode_render(odd, "\ufdd0", "continuation")
    called = answer(text, "x")
    kept = msgspec.structs.replace(called, ids=families.pack(ids), body_start=0)
    after = text.composer.tokens(Conversation((USER, kept, result(called.calls[0])), TOOL))
    shown = "".join(text.tokenizer.control_text(i) or chr(i) for i in after)
    assert odd in shown


def test_an_empty_think_block_of_the_prompt_is_not_lost_from_the_log():
    """4: an empty think block of the prompt that history omits is rewritten, not glued."""
    text = family_templates.text_of("hermes")
    options = {"enable_thinking": False}
    kept = Message(role="assistant", text="a", ids=families.pack([97]))
    first = Conversation((USER,), (), options)
    whole = Conversation((USER, kept, USER), (), options)
    log = [*text.composer.tokens(first), 97]
    after = text.composer.tokens(whole)
    assert text.composer.extension(whole, 2) is None
    assert common(log, after) == len(text.composer.tokens(first)) - len(
        text.tokenizer.encode_render("<think>\n\n</think>\n\n", "\ufdd0")
    )


@pytest.mark.parametrize("name", family_templates.NAMES)
def test_the_end_of_a_message_is_the_template_s_once(name):
    """5: a stop token that ends a turn is not logged, and the next prompt has it exactly once."""
    text = family_templates.text_of(name)
    called = answer(text, "step")
    log = text.composer.tokens(Conversation((USER, called), TOOL), False)
    after = text.composer.tokens(Conversation((USER, called, result(called.calls[0])), TOOL))
    stops = set(text.tokenizer.stop_ids)
    assert log[-1] not in stops
    glue = after[common(log, after) :]
    assert not any(a == b and a in stops for a, b in itertools.pairwise(glue))
