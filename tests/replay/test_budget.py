"""The coding story fits SmolLM2's context, counted with its own tokenizer and template."""

import random
from pathlib import Path

import pytest

from agentserve.engine.plan import pack
from agentserve.model.prepare import prepare
from agentserve.replay.generator import Workload, generate
from agentserve.replay.scenario import Scenario, load_scenario
from agentserve.replay.tools import StoryTools
from agentserve.replay.workspace import Workspace
from agentserve.sessions.compose import Composer
from agentserve.sessions.conversation import Call, Conversation, Message
from agentserve.sessions.tokenizer import Tokenizer
from agentserve.sessions.toolformat import detect

pytestmark = pytest.mark.model

STORY = Path(__file__).parents[2] / "scenarios" / "coding.toml"
CONTEXT = 8192


class Counter:
    """Builds the conversation of a story as the server does."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.load(prepare("smollm2-135m"))
        self.format = detect(self.tokenizer.chat_template)
        self.composer = Composer(self.tokenizer, self.format, random=random.Random(0))

    async def play(self, scenario: Scenario) -> tuple[int, list[int]]:
        """Return the tokens of the whole session and the output tokens of each turn."""
        tools = tuple(tool.declared() for tool in scenario.tools)
        system = scenario.system
        messages, outputs = [Message(role="system", text=system)], []
        with Workspace(scenario.files) as workspace:
            story = StoryTools(scenario, workspace)
            for number, turn in enumerate(scenario.turns):
                if turn.user is not None:
                    messages.append(Message(role="user", text=turn.user))
                ids = self.tokenizer.encode_text(self.format.emit(turn.forced()))
                outputs.append(len(ids))
                calls = tuple(
                    Call(f"call{number}{place}", call.name, call.arguments)
                    for place, call in enumerate(turn.calls)
                )
                messages.append(Message(role="assistant", calls=calls, ids=pack(ids)))
                results = await story.scripted(turn.calls)
                messages += [
                    Message(role="tool", text=out.output, call_id=call.call_id, name=call.name)
                    for call, out in zip(calls, results, strict=True)
                ]
        return len(self.composer.tokens(Conversation(tuple(messages), tools))), outputs


async def test_the_coding_story_fits_the_context_with_room_for_another_tool_prompt():
    total, _ = await Counter().play(load_scenario(STORY))
    assert total <= CONTEXT - 500


async def test_a_turn_of_the_coding_story_puts_out_about_25_tokens():
    _, outputs = await Counter().play(load_scenario(STORY))
    assert 20 <= sum(outputs) / len(outputs) <= 28
    assert max(outputs) <= 80


async def test_generated_sizes_are_tokens_up_to_the_template_s_own():
    counter = Counter()
    (scenario,) = generate(Workload(sessions=1, turns=4, prompt=100, new=50, output=32))
    _, outputs = await counter.play(scenario)
    assert outputs[:3] == [32, 32, 32]
    encoded = counter.tokenizer.encode_text(scenario.turns[0].calls[0].result or "")
    assert len(encoded) == 50
