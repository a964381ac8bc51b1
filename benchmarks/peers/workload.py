"""What every system is given: closed-loop agents, as stories for agentserve and as ids for peers.

`generate` writes the stories. `token_turns` says what they come to in token ids with the model's
own template, so that every system computes prompts of exactly the same lengths: the first prompt,
and then per turn what the tool's result adds. The answers have a fixed number of tokens. agentserve
is made to say the story's own words; a peer says what it likes, without an end-of-text, and what it
said is sent back as token ids. So no peer ever tokenises or renders, and its prefix cache finds all
that it computed before.
"""

import random
from pathlib import Path

import msgspec

from agentserve.assembly import load_text
from agentserve.engine.plan import pack
from agentserve.replay.generator import Workload, generate
from agentserve.replay.scenario import Scenario, ScenarioTurn
from agentserve.sessions.conversation import Call, Conversation, Message
from agentserve.sessions.text import ModelText

CONTEXT = 8192  # tokens; the model's own
ROOMY = 16 * CONTEXT  # tokens of KV, where every session may stay
TIGHT = 24_576
TIGHT_SLOTS = 4  # of 6,144 tokens each, which hold a session to its end
HOST_BYTES = 8 << 30  # beside it, for every system that can use host memory
PROMPT_ID = "call00000"
ANSWER = "assistant"


class Case(msgspec.Struct, frozen=True):
    """One of the races: which agents, and the device KV that a system may use."""

    name: str
    workload: Workload
    kv_tokens: int = ROOMY
    host_bytes: int | None = None  # for KV that leaves the device; None: the system's default

    @property
    def slots(self) -> int:
        """How many sessions the KV holds to their ends: who cannot preempt runs no more at once."""
        sessions = self.workload.sessions
        return sessions if self.kv_tokens >= ROOMY else min(sessions, TIGHT_SLOTS)

    @property
    def label(self) -> str:
        """The name under which results are kept; another size is another race."""
        size, full = self.workload, CASES[self.name].workload
        if (size.sessions, size.turns) == (full.sessions, full.turns):
            return self.name
        return f"{self.name}-{size.sessions}x{size.turns}"


class TokenTurn(msgspec.Struct, frozen=True):
    """One turn in token ids: what the prompt grows by, and how many tokens are sampled.

    The last sampled token stands where the template ends the answer.
    """

    new: list[int]
    output: int
    gap_s: float  # from the end of this turn to the next


# Words of the system text, of each result and of each answer, so that with the template's own
# tokens 1,250 are shared, a turn brings about 175, and 32 are sampled.
_AGENTS = Workload(turns=20, prompt=1157, first=165, new=165, output=31, seed=4)
_ONE = msgspec.structs.replace(_AGENTS, sessions=1, gap=0.05)
_SIXTEEN = msgspec.structs.replace(_AGENTS, sessions=16, gap=1.0)
CASES = {
    case.name: case
    for case in (
        Case("single", _ONE),
        Case("sixteen", _SIXTEEN),
        Case("pressure", _SIXTEEN, TIGHT, HOST_BYTES),
    )
}


def sized(case: Case, sessions: int | None, turns: int | None) -> Case:
    """Return the case with another number of sessions or turns."""
    size = case.workload
    size = msgspec.structs.replace(
        size, sessions=sessions or size.sessions, turns=turns or size.turns
    )
    return msgspec.structs.replace(case, workload=size)


def token_turns(workload: Workload, directory: Path) -> list[list[TokenTurn]]:
    """Return each session's turns for the model in a prepared directory."""
    text = load_text(directory, "model")
    return [_session(story, text) for story in generate(workload)]


def _session(story: Scenario, text: ModelText) -> list[TokenTurn]:
    tools = tuple(tool.declared() for tool in story.tools)
    messages = [Message("system", story.system), Message("user", story.turns[0].user or "")]
    new = text.composer.tokens(Conversation(tuple(messages), tools))
    turns = []
    for turn in story.turns:
        said = text.tokenizer.encode_text(text.format.emit(list(turn.forced())))
        turns.append(TokenTurn(new, len(said) + 1, story.tool_seconds(turn)))
        if turn.calls:
            messages += _called(turn, said)
            new = _glue(text, Conversation(tuple(messages), tools))
    return turns


def _called(turn: ScenarioTurn, said: list[int]) -> list[Message]:
    """Return the answer with its one call, and the tool's result."""
    (call,) = turn.calls
    answer = Message(ANSWER, calls=(Call(PROMPT_ID, call.name, call.arguments),), ids=pack(said))
    return [answer, Message("tool", call.result or "", call_id=PROMPT_ID, name=call.name)]


def _glue(text: ModelText, conversation: Conversation) -> list[int]:
    """Return what follows the sampled tokens, which include the end of the answer."""
    glue = text.composer.extension(conversation, len(conversation.messages) - 1)
    if glue is None or glue[0] not in text.tokenizer.stop_ids:
        raise ValueError("this model's template does not end answers by a stop token")
    return glue[1:]


def shared_prefix(sessions: list[list[TokenTurn]]) -> int:
    """Return how many tokens the first prompts of all sessions have in common."""
    prompts = [turns[0].new for turns in sessions]
    length = 0
    for ids in zip(*prompts, strict=False):
        if len(set(ids)) > 1:
            break
        length += 1
    return length


def strangers(count: int, seed: int = 0) -> list[int]:
    """Return token ids that no session has in this order, to warm a system up with."""
    source = random.Random(f"warm-up {seed}")
    return [source.randrange(1000, 40_000) for _ in range(count)]
