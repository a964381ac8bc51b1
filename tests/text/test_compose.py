import functools
import random

import msgspec
import pytest
import text_models

from agentserve import wire
from agentserve.engine.plan import pack
from agentserve.errors import InvalidRequest
from agentserve.sessions.compose import Call, Composer, Conversation, Message
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import HERMES, JSON, detect

NAMES = ["smollm2", "qwen3", "sentencepiece"]
GREP = wire.Tool(
    "grep",
    {
        "type": "object",
        "properties": {"pattern": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["pattern"],
    },
    "Search the files.\nMore about it.",
)
READ = wire.Tool(
    "read", {"type": "object"}, examples=[{"input": "open a", "arguments": {"p": "a"}}]
)


def compose_for(name, **options):
    tokenizer = text_models.tokenizer(name)
    options = {"check_rate": 1.0, "random": random.Random(7)} | options
    return Composer(tokenizer, detect(tokenizer.chat_template), **options)


@functools.cache
def composer_of(name):
    return compose_for(name)


def user(text):
    return Message(role="user", text=text)


def system(text):
    return Message(role="system", text=text)


def kept(name, text, *, calls=(), body=None, tail=""):
    """Return an assistant message as this vocabulary's model would have generated it."""
    ids = text_models.tokenizer(name).encode_text(text)
    start = 0
    if body is not None:
        start = len(text_models.tokenizer(name).encode_text(text.removesuffix(body)))
        ids = ids[:start] + text_models.tokenizer(name).encode_text(body)
    return Message(role="assistant", ids=pack(ids), body_start=start, calls=calls, tail=tail)


def result(text, number=0, name="grep"):
    return Message(role="tool", text=text, name=name, call_id=f"call{number:05}")


def calls(*names):
    return tuple(Call(f"call{i:05}", name, {"n": i}) for i, name in enumerate(names))


def shown(name, ids):
    """Return ids as text, control tokens visible."""
    return text_models.reference(name).decode(ids)


BENIGN = [
    "Hello, world!",
    "  two\n\nlines with 12345 numbers  ",
    "naïve 日本語 😀 <b>bold</b> a < b > c {json: [1, 2]} </div> |x|",
    "def f(x):\n    return x << 2  # <- shift",
    "user",
    "think",
    ">",
    "<",
]


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_apply_chat_template_on_benign_text(name):
    reference, composer = text_models.reference(name), composer_of(name)
    triples = zip(BENIGN, BENIGN[3:] + BENIGN[:3], BENIGN[5:] + BENIGN[:5], strict=True)
    for first, second, third in triples:
        for lead in ([], [system("Be brief.")]):
            ours = [*lead, user(first), Message(role="assistant", text=second), user(third)]
            theirs = [{"role": m.role, "content": m.text} for m in ours]
            expected = reference.apply_chat_template(
                theirs, add_generation_prompt=True, return_dict=False
            )
            assert composer.tokens(Conversation(tuple(ours))) == expected


def test_ids_equal_apply_chat_template_with_native_tools_and_calls():
    reference, composer = text_models.reference("qwen3"), composer_of("qwen3")
    told = Message(role="assistant", text="ok", reasoning="hm", calls=calls("grep", "read"))
    ours = (user("find"), told, result("a.py", 0), result("b", 1, "read"))
    functions = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in told.calls
    ]
    theirs = [
        {"role": "user", "content": "find"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": functions},
        {"role": "tool", "content": "grep: a.py"},
        {"role": "tool", "content": "read: b"},
    ]
    tools = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
        }
        for t in (GREP, READ)
    ]
    for thinking in (True, False):
        expected = reference.apply_chat_template(
            theirs,
            tools=tools,
            add_generation_prompt=True,
            return_dict=False,
            enable_thinking=thinking,
        )
        conversation = Conversation(ours, (GREP, READ), {"enable_thinking": thinking})
        assert composer.tokens(conversation) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_only_grows_and_glue_equals_the_full_render(name):
    """The log of each turn is a prefix of the next turn's prompt; kept ids stay in place."""
    composer = compose_for(name)
    messages = (system("Work."), user("find it"))
    log = composer.tokens(Conversation(messages, (GREP, READ)))
    for turn in range(8):
        names = ("grep", "read") if turn % 3 == 1 else ("grep",)
        answer = kept(name, f"step {turn}", calls=calls(*names), tail="!" if turn == 4 else "")
        generated = list(memoryview(answer.ids).cast("i"))
        log += generated
        history = (*messages, answer)
        assert composer.tokens(Conversation(history, (GREP, READ)), False)[: len(log)] == log
        new = [result(f"out {turn} <|im_end|>", i, called) for i, called in enumerate(names)]
        if turn % 4 == 3:
            new.append(user("and now?"))
        messages = (*history, *new)
        whole = Conversation(messages, (GREP, READ))
        full = composer.tokens(whole)
        glue = composer.extension(whole, len(history))
        assert full[: len(log)] == log
        assert glue == full[len(log) :]
        log = full
    assert composer.mismatches == 0
    assert composer.local


def test_the_cost_of_glue_does_not_grow_with_the_session(monkeypatch):
    composer = compose_for("smollm2", check_rate=0.0)
    rendered = []
    render = type(composer._template).render

    def spy(self, messages, **options):
        rendered.append(sum(len(message["content"]) for message in messages))
        return render(self, messages, **options)

    monkeypatch.setattr(type(composer._template), "render", spy)
    sizes = []
    for length in (1, 50):
        turns = [user("q"), kept("smollm2", "a " * 40)] * length
        whole = Conversation((*turns, user("next")), (GREP,))
        rendered.clear()
        assert composer.extension(whole, len(turns)) is not None
        sizes.append(sum(rendered))
    assert sizes[0] == sizes[1]


def test_reasoning_stays_in_a_loop_and_goes_at_the_next_question():
    composer = compose_for("qwen3")
    thought = kept("qwen3", "<think>\nhm\n</think>\n\nlook", body="look", calls=calls("grep"))
    loop = (user("q"), thought, result("r"))
    inside = composer.tokens(Conversation(loop, (GREP,)))
    assert "hm" in shown("qwen3", inside)
    log = composer.tokens(Conversation(loop[:2], (GREP,)), False)
    assert inside[: len(log)] == log
    assert composer.extension(Conversation(loop, (GREP,)), 2) == inside[len(log) :]
    asked = Conversation((*loop, kept("qwen3", "done"), user("more")), (GREP,))
    after = composer.tokens(asked)
    assert "hm" not in shown("qwen3", after)
    assert "look" in shown("qwen3", after)
    assert composer.extension(asked, 4) is None
    appended = composer.extension(asked, 4, keep=True)
    assert shown("qwen3", appended) == (
        "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_empty_think_block_that_history_omits_is_not_glued():
    composer = compose_for("qwen3")
    options = {"enable_thinking": False}
    whole = Conversation((user("q"), kept("qwen3", "a"), user("b")), options=options)
    assert composer.extension(whole, 2) is None
    assert "</think>" in shown("qwen3", composer.tokens(whole)[-6:])
    assert composer.mismatches == 0


def test_an_open_message_goes_on_where_it_was_cut():
    for name in NAMES:
        composer = compose_for(name)
        part = msgspec.structs.replace(kept(name, "half a", tail=" sen"), open=True)
        whole = Conversation((user("q"), part))
        log = composer.tokens(Conversation((user("q"),))) + list(memoryview(part.ids).cast("i"))
        ids = composer.tokens(whole)
        assert ids[: len(log)] == log
        assert ids[len(log) :] == composer.extension(whole, 2)
        assert text_models.tokenizer(name).decode(ids).endswith("half a sen")


def test_a_wrong_extension_is_counted_and_turns_local_rendering_off():
    composer = compose_for("smollm2")
    whole = Conversation((user("q"), kept("smollm2", "a"), user("b")))
    good = composer.extension(whole, 2)
    composer._local_glue = lambda *_: good[:-1]
    assert composer.extension(whole, 2) is None
    assert (composer.mismatches, composer.local) == (1, False)
    assert composer.extension(whole, 2) is None


def test_json_mode_lists_the_tools_and_begins_with_a_worked_example_of_each():
    ids = composer_of("smollm2").tokens(Conversation((system("S."), user("q")), (GREP, READ)))
    text = shown("smollm2", ids)
    assert text == (
        "<|im_start|>system\nS.\n\n"
        "You have these tools. Call one with a line of JSON. Then tell the user its result.\n"
        "- grep: Search the files. Arguments: pattern, limit\n"
        "- read: a tool<|im_end|>\n"
        "<|im_start|>user\nSearch the files: apple<|im_end|>\n"
        '<|im_start|>assistant\n{"name": "grep", "arguments": {"pattern": "apple"}}<|im_end|>\n'
        "<|im_start|>tool\nblue and green<|im_end|>\n"
        "<|im_start|>assistant\nIt is blue and green.<|im_end|>\n"
        "<|im_start|>user\nopen a<|im_end|>\n"
        '<|im_start|>assistant\n{"name": "read", "arguments": {"p": "a"}}<|im_end|>\n'
        "<|im_start|>tool\nblue and green<|im_end|>\n"
        "<|im_start|>assistant\nIt is blue and green.<|im_end|>\n"
        "<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_that_knows_tools_gets_no_worked_examples():
    text = shown("qwen3", composer_of("qwen3").tokens(Conversation((user("q"),), (READ,))))
    assert "open a" not in text
    assert text.count("<|im_start|>user") == 1


def test_a_tool_turn_of_json_mode_costs_few_tokens():
    whole = Conversation(
        (user("q"), kept("smollm2", "x", calls=calls("grep")), result("ok")), (GREP,)
    )
    glue = composer_of("smollm2").extension(whole, 2)
    assert shown("smollm2", glue) == (
        "<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(glue) <= 12


def test_several_results_say_which_call_they_answer():
    answer = kept("smollm2", "x", calls=calls("grep", "read", "grep"))
    new = (result("A", 0), result("B", 1, "read"), result("C", 2))
    glue = composer_of("smollm2").extension(
        Conversation((user("q"), answer, *new), (GREP, READ)), 2
    )
    text = shown("smollm2", glue)
    assert [line for line in text.split("\n") if ": " in line] == [
        "grep #1: A<|im_end|>",
        "read: B<|im_end|>",
        "grep #2: C<|im_end|>",
    ]


def test_kinds_that_a_template_drops_become_user_text_with_a_warning():
    composer = composer_of("sentencepiece")
    assert len(composer.warnings) == 2
    assert any("tool result" in warning for warning in composer.warnings)
    messages = (
        user("q"),
        kept("sentencepiece", "x", calls=calls("grep")),
        result("found"),
        system("stop soon"),
        user("go on"),
    )
    text = shown("sentencepiece", composer.tokens(Conversation(messages, (GREP,))))
    assert "<|user|>" in text
    assert "[result of grep]\nfound\n\nstop soon\n\ngo on" in text
    assert composer_of("smollm2").warnings == []
    assert composer_of("qwen3").warnings == []


def test_foreign_calls_are_rendered_in_the_format_of_the_model():
    message = Message(role="assistant", text="Look:", calls=calls("grep"))
    for name in ("smollm2", "qwen3"):
        ids = composer_of(name).tokens(Conversation((user("q"), message, result("r")), (GREP,)))
        assert '{"name": "grep", "arguments": {"n": 0}}' in shown(name, ids)


def with_template(template):
    tokenizer = text_models.tokenizer("smollm2")
    twin = object.__new__(Tokenizer)
    twin.__dict__.update(tokenizer.__dict__)
    twin.chat_template = template
    return twin


def compose_with(template):
    return Composer(with_template(template), JSON, random=random.Random(1))


def test_a_template_that_refuses_is_an_invalid_request():
    composer = compose_with(
        "{% for m in messages %}{% if 'secret' in m.content %}"
        "{{ raise_exception('no secrets') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="no secrets"):
        composer.tokens(Conversation((user("a secret"),)))


def test_a_template_that_is_not_usable_is_refused_at_load():
    with pytest.raises(ValueError, match="not valid"):
        compose_with("{% for %}")
    with pytest.raises(ValueError, match="drops user"):
        compose_with("hello")


def test_a_template_whose_past_depends_on_the_future_gets_full_renders():
    composer = compose_with(
        "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.role ~ ': ' ~ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    whole = Conversation((user("q"), kept("smollm2", "a"), user("b")))
    assert composer.extension(whole, 2) is None
    assert text_models.tokenizer("smollm2").decode(composer.tokens(whole)) == (
        "user: q\nassistant: a\n!user: b\nassistant: "
    )


def test_glue_that_depends_on_the_length_of_the_history_is_found_at_load():
    composer = compose_with(
        "{% for m in messages %}{{ loop.index ~ m.role ~ ': ' ~ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    whole = Conversation((user("q"), kept("smollm2", "a"), user("b")))
    assert composer.extension(whole, 2) is None


def test_the_clock_of_a_template_is_frozen():
    composer = compose_with(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    decode = text_models.tokenizer("smollm2").decode
    for now, date in ((0.0, "01 Jan 1970"), (1_800_000_000.0, "15 Jan 2027")):
        ids = composer.tokens(Conversation((user("x"),), now=now))
        assert decode(ids) == f"{date}x"


def test_template_helpers_of_model_authors_work():
    composer = compose_with(
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ {'b': m.content, 'a': '<é>'} | tojson(indent=1) }}{% endgeneration %}"
        "{% endfor %}"
    )
    decode = text_models.tokenizer("smollm2").decode
    assert decode(composer.tokens(Conversation((user("x"),)))) == '{\n "b": "x",\n "a": "<é>"\n}'


def test_nesting_too_deep_is_an_invalid_request():
    deep = {}
    for _ in range(2000):
        deep = {"a": deep}
    message = Message(role="assistant", calls=(Call("c", "grep", deep),))
    with pytest.raises(InvalidRequest, match="deep"):
        composer_of("qwen3").tokens(Conversation((user("q"), message)))


def test_a_prompt_that_opens_reasoning_is_noticed():
    template = text_models.QWEN3_TEMPLATE.replace(
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}",
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n<think>\\n' }}",
    )
    composer = Composer(with_template(template), HERMES, random=random.Random(1))
    assert composer.opens_reasoning({})
    assert not composer_of("qwen3").opens_reasoning({})
    assert not composer_of("smollm2").opens_reasoning({})


class Counted(tuple):
    """A tuple that counts how many of its elements slices have copied."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.copied += len(found) if isinstance(key, slice) else 0
        return found


@pytest.mark.parametrize("name", NAMES)
def test_a_long_history_is_taken_apart_once_and_not_for_each_message(name):
    Counted.copied, count = 0, 400
    turns = [one for number in range(count) for one in (user("q"), kept(name, f"a{number}"))]
    compose_for(name, check_rate=0.0).tokens(Conversation(Counted(turns)))
    assert Counted.copied <= 4 * len(turns)
