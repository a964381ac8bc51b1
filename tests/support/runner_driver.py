"""Plans made by hand: sequences on a runner, several in a step, without an engine."""

from agentserve.engine.plan import (
    Row,
    SamplingParams,
    SlotAdd,
    SlotDrop,
    StepPlan,
    TableAppend,
    pack,
)


class Sequence:
    """One sequence: its tokens, how many of them have KV, and its blocks."""

    def __init__(self, prompt, sampling=SamplingParams(), forced=()):  # noqa: B008 - frozen
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.sampling = sampling
        self.forced = list(forced)
        self.computed = 0
        self.slot = None
        self.blocks = []

    @property
    def output(self):
        return self.tokens[self.prompt_length :]


class Driver:
    """Deals blocks and slots, and runs steps of chosen rows."""

    def __init__(self, runner):
        self.runner = runner
        self.free_blocks = list(range(runner.info.num_blocks))[::-1]
        self.generation = 0
        self.step_number = 0
        self.open = {}
        self._dropped, self._added = [], []

    def join(self, sequence, slot):
        self.generation += 1
        sequence.slot, sequence.generation = slot, self.generation
        history = b""
        if sequence.sampling.needs_history:
            history = pack(sequence.tokens[: sequence.computed])
        sampling, forced = sequence.sampling, pack(sequence.forced)
        self._added.append(
            SlotAdd(slot, self.generation, sampling, sequence.prompt_length, history, forced)
        )
        self.open[slot] = sequence
        sequence.pending = list(sequence.blocks)

    def leave(self, sequence):
        self._dropped.append(SlotDrop(sequence.slot, sequence.generation))
        del self.open[sequence.slot]
        sequence.slot = None

    def release(self, sequence):
        self.free_blocks += sequence.blocks
        sequence.blocks = []

    def step(self, work, masks=None):
        """Run (sequence, count) rows; samples where a row reaches the end. Returns the result."""
        rows, tokens, appended = [], [], []
        for sequence, count in work:
            end = sequence.computed + count
            while len(sequence.blocks) * self.runner.info.block_size < end:
                sequence.blocks.append(self.free_blocks.pop())
                sequence.pending.append(sequence.blocks[-1])
            if sequence.pending:
                appended.append(TableAppend(sequence.slot, 0, sequence.pending))
                sequence.pending = []
            rows.append(
                Row(sequence.slot, sequence.computed, count, sample=end == len(sequence.tokens))
            )
            tokens += sequence.tokens[sequence.computed : end]
        plan = StepPlan(
            self.step_number, self._dropped, self._added, appended, [], rows, pack(tokens)
        )
        self.step_number += 1
        self._dropped, self._added = [], []
        handle = self.runner.launch(plan)
        self.runner.sample(handle, masks or {})
        result = self.runner.collect(handle)
        for (sequence, count), sampled in zip(work, result.tokens, strict=True):
            sequence.computed += count
            done = len(sequence.output)
            sequence.tokens += sequence.forced[done : done + len(sampled)] or sampled
        return result

    def generate(self, sequence, count, slot=0):
        """Run one sequence alone until it has `count` tokens of output."""
        self.join(sequence, slot)
        while len(sequence.output) < count:
            self.step([(sequence, len(sequence.tokens) - sequence.computed)])
        self.leave(sequence)
        self.step([])
        self.release(sequence)
        return sequence.output
