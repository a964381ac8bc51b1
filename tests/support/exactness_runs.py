"""One conversation of the real model, again and again, while its KV moves or gets lost.

The promise: (a) where nothing is computed again and the steps are the same, KV bytes, logits and
tokens are those of a session that was never touched; (b) where something is computed again, or in
other steps (beside another session, after a preemption), with the same tokens forced, logits are
within 5e-4 and the best token is the same wherever it leads by more than 1e-3.
"""

import hashlib
import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from agentserve.clock import SystemClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import (
    Cancel,
    Close,
    Finished,
    Fork,
    Hint,
    Started,
    Submit,
    Tokens,
)
from agentserve.engine.plan import pack
from agentserve.kv.copies import DEVICE, HOST

WITHIN, CLEAR = 5e-4, 1e-3
LINES = (
    "Read the test file and tell me which of the cases fails.",
    "tests/test_parser.py:41: AssertionError: expected 3, got 4",
    "Which line of the parser decides that?",
    "Make the change and run the tests again.",
    "12 passed, 1 failed in 0.31 s",
    "Why does the last one still fail?",
    "def parse(text): return [int(part) for part in text.split(',')]",
    "Explain it in one sentence.",
    "What is the capital of France, by the way?",
    "Write the commit message.",
)


@dataclass
class Trace:
    """What a run gave, turn by turn, and the logits behind each output token, by position."""

    outputs: list[list[int]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of all KV after the turn
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    from_host: int = 0  # tokens
    computed_again: int = 0
    preemptions: int = 0
    demoted: int = 0  # of `from_host`, what a preempted turn had on the device


class Recorder:
    """A runner of the sizes `changes` that keeps the logits of every sampled row of a session."""

    def __init__(self, runner, logits, is_ours, **changes):
        self.info = msgspec.structs.replace(runner.info, **changes)
        self.launch, self.collect = runner.launch, runner.collect
        self._runner, self._logits, self._is_ours = runner, logits, is_ours

    def sample(self, handle, masks):
        sampled = [row for row in handle.plan.rows if row.sample]
        for row, logits in zip(sampled, handle.logits, strict=True):
            if self._is_ours(row):
                self._logits[row.start + row.count] = logits.copy()
        self._runner.sample(handle, masks)


class Conversation:
    """One session on an engine of its own; the runner is shared by all of them, one at a time."""

    def __init__(self, runner, *, host: bool, blocks: int = 0):
        self.trace = Trace()
        self._cache = runner._decoder.cache
        sizes = {"num_blocks": blocks} if blocks else {}
        recorder = Recorder(
            runner,
            self.trace.logits,
            self._is_ours,
            host_blocks=runner.info.host_blocks if host else 0,
            **sizes,
        )
        settings = EngineSettings(token_budget=96, check_invariants=True)
        self.engine = Engine(recorder, SystemClock(), settings)
        self._block_size = runner.info.block_size
        self._sequence, self._number = 1, 0
        self._log: list[int] = []
        self._keep = 0

    @property
    def engine_turn(self):
        """The open turn, as the engine has it."""
        return self.engine._sequences[self._sequence].turn

    def _is_ours(self, row):
        sequence = self.engine._sequences.get(self._sequence)
        return sequence is not None and sequence.turn is not None and sequence.turn.slot == row.slot

    @property
    def _chain(self):
        return self.engine._sequences[self._sequence].chain

    def turn(self, new, count, force=(), preempt=None):
        """Run a turn of `count` tokens; `preempt` is called before every step."""
        self._number += 1
        tokens = pack([*self._log[self._keep :], *new])
        submit = Submit(
            self._number, self._sequence, 1, self._keep, tokens, "a", count, [], force=pack(force)
        )
        self.engine.apply(submit)
        output: list[int] = []
        finished = None
        while finished is None:
            if preempt is not None:
                preempt(self.engine, self._chain)
            for event in self.engine.step():
                if getattr(event, "turn", None) != self._number:
                    continue
                if isinstance(event, Tokens):
                    output += event.tokens
                elif isinstance(event, Started):
                    self.trace.from_host += event.host
                    self.trace.computed_again += event.lost
                elif isinstance(event, Finished):
                    finished = event
        assert finished.reason == "length"
        self.trace.computed_again += finished.recomputed
        self._log += [*new, *output]
        self._keep = len(self._log)
        self.trace.outputs.append(output)
        self.trace.digests.append(self._digest())

    def offload(self):
        """Let the host tier have the only copy."""
        self.engine.apply(Hint(self._sequence, kv="host"))
        while self.engine.busy:
            self.engine.step()
        holders = self._chain.groups[0].holders()
        assert all(HOST in holder.copies and DEVICE not in holder.copies for holder in holders)

    def lose_host_copies(self, count):
        """Lose the last `count` blocks of an offloaded session."""
        for _ in range(count):
            assert self.engine._kv.residency.drop_host(lambda chains: chains[0])

    def blocks(self):
        return len(self._chain.groups[0].holders())

    def length_with(self, new):
        """Return the length of the next turn's prompt, in tokens."""
        return len(self._log) + len(new)

    def fork(self):
        """Go on in a fork at the last full block, and forget the rest."""
        self._keep = self._chain.length // self._block_size * self._block_size
        self.engine.apply(Fork(self._sequence, 1, self._sequence + 1, 1, self._keep))
        self.engine.apply(Close(self._sequence))
        self._sequence += 1

    def _digest(self):
        chain = self._chain
        slots = [holder.copies[DEVICE].number for holder in chain.groups[0].holders()]
        # [blocks, layers, 2, heads, block_size, width] -> [tokens, ...]
        records = self._cache[slots].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[: chain.length]
        assert len(records) == chain.length > 0
        data = records.contiguous().view(torch.uint8).numpy()
        return hashlib.sha256(data.tobytes()).hexdigest()


class Elder:
    """Another session of the same engine, whose turns always came first.

    It leaves the conversation's next turn the room that it is admitted with and no more, so that
    the engine preempts that turn when both need another block. `new`: the one token of each prompt.
    """

    NUMBER = 1 << 20  # of its sequence; its turns count from there

    def __init__(self, engine, new):
        self.running = False
        self._engine, self._new = engine, new
        self._pool = engine._kv.pools[0]
        self._size = engine._kv.block_size
        self._turn = self.NUMBER
        self._length = 0  # tokens of its log

    def begin(self, length, ahead):
        """Start a turn beside which a prompt of `length` tokens fits; it needs a block in `ahead`.

        ahead: decode steps from that prompt's admission on, 1 or more.
        """
        blocks = self._pool.total - -(-length // self._size) - 1  # 1: what admission leaves free
        keep = blocks * self._size - 1 - ahead
        tokens = [self._new]
        if self._turn == self.NUMBER:
            keep, tokens = 0, [self._new + n % 1000 for n in range(keep + 1)]
        keep = min(keep, self._length)
        self._turn += 1
        self._engine.apply(
            Submit(self._turn, self.NUMBER, 1, keep, pack(tokens), "b", 10 * self._size, [])
        )
        self.running = True
        while not any(isinstance(event, Tokens) for event in self._engine.step()):
            pass

    def end(self):
        """Give back its room, and let everything be saved."""
        self._engine.apply(Cancel(self._turn))
        self.running = False

    def see(self):
        """Note how long its log is."""
        while self._engine.busy:
            self._engine.step()
        self._length = len(self._engine._sequences[self.NUMBER].log)


def script(tokenizer, turns, seed):
    """Return (new tokens, how many tokens to give) for every turn."""
    rng = random.Random(seed)
    form = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    lines = [form.format(rng.choice(LINES)) for _ in range(turns)]
    return [(tokenizer.encode(line).ids, rng.randint(3, 8)) for line in lines]


def untouched(runner, turns, *, forks=False):
    """The reference: never offloaded."""
    talk = Conversation(runner, host=True)
    for number, (new, count) in enumerate(turns):
        if forks and number:
            talk.fork()
        talk.turn(new, count)
    assert talk.trace.from_host == talk.trace.computed_again == 0
    return talk.trace


def offloaded(runner, turns, *, forks=False):
    """Offloaded after every turn; what the next one needs comes back from the host."""
    talk = Conversation(runner, host=True)
    for number, (new, count) in enumerate(turns):
        if number:
            talk.offload()
            if forks:
                talk.fork()
        talk.turn(new, count)
    assert talk.trace.computed_again == 0
    return talk.trace


def with_losses(runner, turns, seed, outputs):
    """Offloaded after every turn; then the host loses a random part. `outputs` are forced."""
    rng = random.Random(seed)
    talk = Conversation(runner, host=True)
    for number, (new, count) in enumerate(turns):
        if number:
            talk.offload()
            talk.lose_host_copies(rng.randint(0, talk.blocks()))
        talk.turn(new, count, outputs[number])
    return talk.trace


def preempted(runner, turns, seed, outputs, chance=0.15):
    """Without a host tier; preempted with `chance` a step, and a random part goes to others."""
    rng = random.Random(seed)
    talk = Conversation(runner, host=False)

    def preempt(engine, chain):
        scheduler, kv = engine._scheduler, engine._kv
        if scheduler.running and rng.random() < chance:
            scheduler._make_room(scheduler.running[0])
            lost = rng.randint(0, len(chain.groups[0].holders()))
            kv.residency._strip(chain, 0, kv.pools[0].free + lost, clean=False)

    for (new, count), output in zip(turns, outputs, strict=True):
        talk.turn(new, count, output, preempt)
    return talk.trace


def demoted(runner, turns, seed, outputs):
    """With a host tier; preempted by the engine itself, and a random part of it goes to the host.

    An older session takes the block that the turn needs. While the turn waits, the policy's victim
    is asked for more room: what has no host copy is saved, then all of it leaves the device.
    """
    rng = random.Random(seed)
    blocks = sum(len(new) + count for new, count in turns) // runner.info.block_size + 8
    talk = Conversation(runner, host=True, blocks=blocks)
    elder = Elder(talk.engine, turns[0][0][0])
    wanted = None  # blocks that are to be free, while the turn waits

    def preempt(engine, chain):
        nonlocal wanted
        turn = talk.engine_turn
        if turn.preemptions and not turn.running:
            if wanted is None:
                wanted = rng.randint(1, len(chain.groups[0].holders()))
            if elder.running and engine._kv.residency.make_room(0, wanted):
                elder.end()
        elif wanted is not None:
            talk.trace.demoted += chain.from_host
            wanted = None

    for (new, count), output in zip(turns, outputs, strict=True):
        elder.begin(talk.length_with(new), rng.randint(1, 2))
        talk.turn(new, count, output, preempt)
        elder.end()
        elder.see()
    talk.trace.from_host += talk.trace.demoted
    talk.trace.preemptions = talk.engine.stats().preemptions
    return talk.trace


def compare_moved(reference: Trace, moved: Trace) -> dict:
    """Class (a): everything is equal, bit by bit."""
    assert moved.outputs == reference.outputs
    assert moved.digests == reference.digests
    assert moved.logits.keys() == reference.logits.keys()
    same = (np.array_equal(moved.logits[n], reference.logits[n]) for n in reference.logits)
    assert all(same)
    assert moved.from_host > 0
    return {
        "turns": len(moved.outputs),
        "tokens_restored": moved.from_host,
        "output_tokens": len(moved.logits),
        "kv_bytes_equal": True,
        "logits_equal": True,
        "tokens_equal": True,
    }


def compare_recomputed(reference: Trace, again: Trace) -> dict:
    """Class (b), where tokens were computed again."""
    assert again.computed_again > 0
    return {"tokens_computed_again": again.computed_again, **_within_bounds(reference, again)}


def compare_demoted(reference: Trace, again: Trace) -> dict:
    """Class (b), because the steps are others: a preempted turn goes on from what was restored.

    Nothing was computed again, so no token was lost.
    """
    assert again.preemptions > 0
    assert again.demoted > 0
    assert again.computed_again == 0
    return {
        "preemptions": again.preemptions,
        "tokens_restored": again.demoted,
        "tokens_computed_again": 0,
        **_within_bounds(reference, again),
    }


def _within_bounds(reference: Trace, again: Trace) -> dict:
    assert again.outputs == reference.outputs, "the outputs were forced"
    assert again.logits.keys() == reference.logits.keys()
    worst, narrow, changed = 0.0, 0, 0
    for position, ours in again.logits.items():
        theirs = reference.logits[position]
        worst = max(worst, float(np.abs(ours - theirs).max()))
        second, best = np.partition(theirs, -2)[-2:]
        if best - second <= CLEAR:
            narrow += 1
            changed += int(ours.argmax() != theirs.argmax())
        else:
            assert ours.argmax() == theirs.argmax(), f"another token at position {position}"
    assert worst <= WITHIN
    return {
        "turns": len(again.outputs),
        "output_tokens": len(again.logits),
        "max_logit_difference": worst,
        "narrow_margins": narrow,
        "narrow_and_changed": changed,
    }
