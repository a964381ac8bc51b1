"""A message that was cut goes on as if it had not been."""

from session_rig import rig
from text_models import tokenizer

from agentserve import wire

SAID = "<think>\nHm, 6 times 7.\n</think>\n\n42, then."
TAGS = ("<think>", "</think>")


def joined(output):
    return [
        "".join("".join(item.text.split()) for item in output if isinstance(item, kind))
        for kind in (wire.ReasoningOut, wire.TextOut)
    ]


def splits_a_tag(text):
    return any(text.endswith(tag[:size]) for tag in TAGS for size in range(1, len(tag)))


async def test_reasoning_goes_on_after_a_cut_and_ends_where_it_ends():
    ids = tokenizer("qwen3").encode_text(SAID)
    cuts = []
    async with rig(tokenizer=tokenizer("qwen3")) as r:
        whole = joined((await r.forced(await r.create(), "6 * 7?", SAID)).output)
        assert all(whole)
        for cut in range(1, len(ids)):
            first, second = map(r.text.tokenizer.decode, (ids[:cut], ids[cut:]))
            if splits_a_tag(first):
                continue
            cuts.append(first)
            s = await r.create()
            turns = [await r.forced(s, "6 * 7?", first + second, max_output_tokens=cut)]
            assert turns[0].stop_reason == "max_tokens"
            turns += [await r.forced(s, [], second[:1], max_output_tokens=0)]
            turns.append(await r.forced(s, [], second))
            assert joined([item for turn in turns for item in turn.output]) == whole, cut
    assert cuts[0].strip() == TAGS[0]
    assert any(first.strip().endswith(TAGS[1]) for first in cuts)
