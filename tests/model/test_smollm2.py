"""The real model at float32: against transformers, and sessions together against each alone.

Rounding differs with batch and chunk sizes, so tokens are compared under a margin rule: logits
within 5e-4, and the same token wherever the best logit leads by more than 1e-3.
"""

import numpy as np
import pytest
import torch
import transformers
from runner_driver import Driver, Sequence
from tokenizers import Tokenizer

from agentserve.clock import SystemClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import Finished, Submit, Tokens
from agentserve.engine.plan import pack
from agentserve.model.build import load_runner
from agentserve.model.prepare import prepare

pytestmark = pytest.mark.model

STEPS = 64
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "List three prime numbers larger than 50.",
    "Explain photosynthesis to a child in two sentences.",
    "Translate 'good morning' to Spanish.",
    "The quick brown fox",
    "Name a country in South America and its capital.",
    "How do I reverse a list in Python?",
    "Who wrote Hamlet?",
    "Summarise: the meeting moved from Monday to Thursday because the room was taken.",
    "1, 1, 2, 3, 5, 8,",
    "Give me a recipe for pancakes with four ingredients.",
    "What is 17 + 25?",
    "In which year did people first walk on the moon?",
    "Complete the sentence: an apple a day",
    "Describe the colour blue without naming it.",
    "SELECT name FROM users WHERE",
    "What does HTTP stand for?",
    "Tell me a joke about computers.",
]


@pytest.fixture(scope="module")
def directory():
    return prepare("smollm2-135m")


@pytest.fixture(scope="module")
def runner(directory):
    options = {"directory": str(directory), "dtype": "float32", "kv_bytes": 512 << 20}
    return Recorder(load_runner(options))


@pytest.fixture(scope="module")
def prompts(directory):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(turn.format(text)).ids for text in PROMPTS]


class Recorder:
    """A runner that keeps the logits of every step's sampled rows."""

    def __init__(self, runner):
        self.runner = runner
        self.info = runner.info
        self.sample, self.collect = runner.sample, runner.collect
        self.logits = []

    def launch(self, plan):
        handle = self.runner.launch(plan)
        self.logits.append(handle.logits.copy())
        return handle


def margins_of(logits):
    """Return by how much the best logit of each row leads."""
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    return best[:, 1] - best[:, 0]


def generate_together(runner, prompts):
    """Return each prompt's greedy tokens and the logits [prompts, steps, vocab] behind them."""
    driver = Driver(runner)
    sequences = [Sequence(prompt) for prompt in prompts]
    for slot, sequence in enumerate(sequences):
        driver.join(sequence, slot)
    runner.logits.clear()
    for _ in range(STEPS):
        driver.step([(s, len(s.tokens) - s.computed) for s in sequences])
    logits = np.stack(runner.logits, axis=1)
    for sequence in sequences:
        driver.leave(sequence)
    driver.step([])
    return [sequence.output for sequence in sequences], logits


def teacher_forced(reference, prompt, output):
    """Return transformers' logits [steps, vocab] where each token of `output` was chosen."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits
    return logits[0].numpy()


def test_greedy_tokens_equal_those_of_transformers_on_20_prompts(directory, runner, prompts):
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    differences, compared = [], 0
    for first in (0, 10):
        batch = prompts[first : first + 10]
        outputs, logits = generate_together(runner, batch)
        for prompt, output, ours in zip(batch, outputs, logits, strict=True):
            theirs = teacher_forced(reference, prompt, output)
            differences.append(np.abs(ours - theirs).max())
            clear = margins_of(theirs) > 1e-3
            assert np.array_equal(theirs.argmax(-1)[clear], np.array(output)[clear])
            compared += clear.sum()
    assert max(differences) <= 5e-4
    assert compared > 0.98 * STEPS * len(prompts), "the rule must not excuse much"


def run_turns(runner, prompts):
    """Run one turn per prompt, all at once; return each one's tokens."""
    engine = Engine(runner, SystemClock(), EngineSettings(token_budget=96, check_invariants=True))
    for turn, prompt in enumerate(prompts):
        engine.apply(Submit(turn, turn, 0, 0, pack(prompt), "tests", 40, [0, 2]))
    tokens = {turn: [] for turn in range(len(prompts))}
    reasons = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens[event.turn] += event.tokens
            elif isinstance(event, Finished):
                reasons[event.turn] = event.reason
    assert set(reasons.values()) <= {"stop", "length"}
    assert len(reasons) == len(prompts)
    return list(tokens.values())


def test_eight_sessions_at_once_give_the_tokens_that_each_gives_alone(runner, prompts):
    # A long common beginning, so that prefix hits, chunked prefill and decodes share steps.
    system = prompts[10] * 4
    chosen = [system + prompt for prompt in prompts[:8]]
    alone, margins = [], []
    for prompt in chosen:
        runner.logits.clear()
        alone += run_turns(runner, [prompt])
        sampled = np.concatenate([step for step in runner.logits if step.size])
        margins.append(margins_of(sampled))
    together = run_turns(runner, chosen)
    assert sum(len(tokens) for tokens in alone) > 100
    for expected, got, margin in zip(alone, together, margins, strict=True):
        if got != expected:
            shared = min(len(got), len(expected))
            parting = next((i for i in range(shared) if got[i] != expected[i]), shared)
            assert margin[parting] <= 1e-3
