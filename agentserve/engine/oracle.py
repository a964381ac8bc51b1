"""The hash oracle: a runner whose next token gives away any wrong KV.

A KV cell holds (token, position, writer's generation). The forward pass reads all cells of a
sequence through the block table that it was told, and the next token is a hash of the (token,
position) pairs read. A stale, foreign, missing or misplaced block changes it at once, and
`oracle_next` says what it should have been: a pure function of the token list.
"""

import hashlib
import math
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentserve.engine.grammars import Compiler
from agentserve.engine.plan import (
    SAMPLED,
    Copy,
    KvGroup,
    Row,
    Runner,
    RunnerInfo,
    SlotAdd,
    StepPlan,
    StepResult,
    TableAppend,
    TokenLogprobs,
    Traffic,
    unpack,
)

_CELL = 8  # bytes of a cell that are hashed: token and position, int32 each


class OracleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of the oracle, and how often it stops by itself.

    With `stop_one_in` n > 0 about one token in n is `stop_id`.
    """

    vocab_size: int = 256
    block_size: int = 16
    num_blocks: int = 256
    host_blocks: int = 0
    max_context: int = 2048
    max_slots: int = 64
    depth: int = 0
    stop_id: int = 0
    stop_one_in: int = 0


def oracle_next(
    tokens: "list[int] | array[int]",
    vocab_size: int = 256,
    *,
    stop_id: int = 0,
    stop_one_in: int = 0,
) -> int:
    """Return the token that follows `tokens`: what the oracle gives when no KV is wrong."""
    return _choose(bytes(_cells(tokens, 0)), vocab_size, stop_id, stop_one_in)


def oracle_logprobs(hashed: int, token: int, count: int, vocab_size: int = 256) -> TokenLogprobs:
    """Return the oracle's log probabilities of `token`, where it has `hashed`.

    That one has the probability 1/2, the one after it 1/4, and so on, cyclically.
    """
    top = [(hashed + place) % vocab_size for place in range(min(count, vocab_size))]
    values = [-math.log(2) * (place + 1) for place in range(len(top))]
    return TokenLogprobs(-math.log(2) * ((token - hashed) % vocab_size + 1), top, values)


@dataclass(slots=True)
class _Slot:
    add: SlotAdd
    table: list[list[int]]  # device block numbers per group


@dataclass(slots=True)
class OracleStep:
    """A launched plan: per row its slot's entry, the hashed token, then the sampled ones.

    `finite` [] is all.
    """

    plan: StepPlan
    adds: list[SlotAdd]
    draws: list[int | None]
    tokens: list[list[int]]
    finite: list[bool] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


class OracleRunner:
    """A Runner on the CPU without a model; see the module's docstring. Takes OracleSettings.

    It computes when it is told to, at any depth. A token that the host does not know is taken only
    if the row in front of it was sampled in the step before; else ValueError is raised.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        block_size: int = 16,
        num_blocks: int = 256,
        max_context: int = 2048,
        max_slots: int = 64,
        host_blocks: int = 0,
        **more: int,
    ) -> None:
        self._more = OracleSettings(**more)
        self.info = RunnerInfo(
            model="oracle",
            identity=f"oracle-{vocab_size}-{block_size}",
            vocab_size=vocab_size,
            max_context=max_context,
            block_size=block_size,
            num_blocks=num_blocks,
            max_slots=max_slots,
            groups=[KvGroup("full", 1, block_size * _CELL)],
            dtype="tokens",
            host_blocks=host_blocks,
            depth=self._more.depth,
        )
        self._block_bytes = block_size * _CELL
        empty = array("i", [-1]).tobytes()
        self._memory, self._host = (
            [[bytearray(empty * (2 * block_size)) for _ in range(count)] for _ in self.info.groups]
            for count in (num_blocks, host_blocks)
        )
        self._flying: list[Copy] = []  # between the tiers, in the order of their plans
        self._moved = {"save": 0, "load": 0}  # blocks
        self._writers = [[[0] * block_size for _ in range(num_blocks)] for _ in self.info.groups]
        self._slots: dict[int, _Slot] = {}
        self._sampled: dict[int, tuple[int, int]] = {}  # slot -> step, what it sampled

    def launch(self, plan: StepPlan) -> OracleStep:
        """Apply the plan to the simulated memory and read every row's cells back."""
        for drop in plan.dropped:
            if self._slots[drop.slot].add.generation != drop.generation:
                raise ValueError(f"slot {drop.slot} is dropped under a stale generation")
            del self._slots[drop.slot]
        for add in plan.added:
            if add.slot in self._slots:
                raise ValueError(f"slot {add.slot} is added twice")
            self._slots[add.slot] = _Slot(add, [[] for _ in self.info.groups])
        for append in plan.appended:
            self._append(append)
        for copy in plan.copies:
            if copy.kind == "device":
                self._copy(copy)
            else:
                self._flying.append(copy)
        tokens = unpack(plan.tokens)
        offset = 0
        for row in plan.rows:
            given = self.inputs(plan, row, tokens[offset : offset + row.count])
            self.write(row.slot, row.start, given)
            offset += row.count
        draws = [self._read(row) if row.sample else None for row in plan.rows]
        adds = [self._slots[row.slot].add for row in plan.rows]
        return OracleStep(plan, adds, draws, [])

    def sample(self, handle: OracleStep, masks: dict[int, Any]) -> None:
        """Take the hashed token, or the first allowed one after it, cyclically."""
        rows, vocab_size = handle.plan.rows, self.info.vocab_size
        for number, (row, hashed) in enumerate(zip(rows, handle.draws, strict=True)):
            handle.tokens.append([])
            handle.logprobs.append([])
            if hashed is None:
                continue
            token = _allowed(hashed, masks.get(number), vocab_size)
            self._sampled[row.slot] = (handle.plan.step, token)
            handle.tokens[number] = [token]
            add = handle.adds[number]
            if (count := add.sampling.logprobs) is not None:
                forced = add.forced_at(row.start + row.count)
                taken = token if forced == SAMPLED else forced
                handle.logprobs[number] = [oracle_logprobs(hashed, taken, count, vocab_size)]

    def collect(self, handle: OracleStep) -> StepResult:
        """Return the result; every value is finite and every copy is done."""
        return self.result(handle, self.land(self._flying.copy()))

    def result(self, handle: OracleStep, tickets: list[int]) -> StepResult:
        """Return the result of a step in which the copies of `tickets` between tiers ended."""
        block_bytes = self._block_bytes
        return StepResult(
            step=handle.plan.step,
            tokens=handle.tokens,
            finite=handle.finite or [True] * len(handle.plan.rows),
            tickets=[c.ticket for c in handle.plan.copies if c.kind == "device"] + tickets,
            traffic=Traffic(
                saved_bytes=self._moved["save"] * block_bytes,
                loaded_bytes=self._moved["load"] * block_bytes,
            ),
            logprobs=handle.logprobs,
        )

    def inputs(self, plan: StepPlan, row: Row, tokens: "array[int]") -> "array[int]":
        """Return the input tokens of a row: `tokens`, or what its slot sampled a step before."""
        if SAMPLED not in tokens:
            return tokens
        step, token = self._sampled.get(row.slot, (-1, 0))
        if not self.info.depth or row.count != 1 or step != plan.step - 1:
            raise ValueError(f"no token was sampled before {row} of step {plan.step}")
        return array("i", [token])

    def land(self, copies: list[Copy]) -> list[int]:
        """Do some of the flying copies, in the given order, and return their tickets."""
        for copy in copies:
            self._flying.remove(copy)
            self._moved[copy.kind] += 1
            self._copy(copy)
        return [copy.ticket for copy in copies]

    def explain(self, slot: int, tokens: "list[int] | array[int]") -> str:
        """Say which cell of the sequence in `slot` is the first that differs from `tokens`."""
        size = self.info.block_size
        for group, table in enumerate(self._slots[slot].table):
            for position, token in enumerate(tokens):
                block = table[position // size]
                place = position % size
                cell = unpack(bytes(self._memory[group][block][place * _CELL : place * _CELL + 8]))
                if list(cell) != [token, position]:
                    return (
                        f"position {position} (block {block}) should hold token {token} and "
                        f"holds token {cell[0]} of position {cell[1]}, "
                        f"written under generation {self._writers[group][block][place]}"
                    )
        return "every cell is right"

    def _copy(self, copy: Copy) -> None:
        source = self._host if copy.kind == "load" else self._memory
        target = self._host if copy.kind == "save" else self._memory
        data = source[copy.group][copy.source][: copy.tokens * _CELL]
        target[copy.group][copy.target][:] = data.ljust(self._block_bytes, b"\xff")

    def _append(self, append: TableAppend) -> None:
        self._slots[append.slot].table[append.group].extend(append.blocks)

    def write(self, slot: int, start: int, tokens: "list[int] | array[int]") -> None:
        """Write cells for `tokens` at positions from `start` on, through the slot's table."""
        size = self.info.block_size
        owner = self._slots[slot]
        cells = _cells(tokens, start)
        for group, table in enumerate(owner.table):
            done = 0
            while done < len(tokens):
                number, place = divmod(start + done, size)
                count = min(size - place, len(tokens) - done)
                block = self._memory[group][table[number]]
                part = cells[done * _CELL : (done + count) * _CELL]
                block[place * _CELL : (place + count) * _CELL] = part
                writers = self._writers[group][table[number]]
                writers[place : place + count] = [owner.add.generation] * count
                done += count

    def _read(self, row: Row) -> int:
        length = row.start + row.count
        table = self._slots[row.slot].table[0]
        used = table[: -(-length // self.info.block_size)]
        cells = b"".join([self._memory[0][block] for block in used])[: length * _CELL]
        return _choose(cells, self.info.vocab_size, self._more.stop_id, self._more.stop_one_in)


def build_oracle(options: dict[str, Any]) -> tuple[Runner, Compiler | None]:
    """Return an oracle runner; `options` are the fields of OracleSettings, unknown ones raise."""
    settings = msgspec.convert(options, OracleSettings)
    return OracleRunner(**msgspec.structs.asdict(settings)), None


def _cells(tokens: "list[int] | array[int]", start: int) -> bytes:
    cells = array("i", bytes(len(tokens) * _CELL))
    cells[0::2] = array("i", tokens)
    cells[1::2] = array("i", range(start, start + len(tokens)))
    return cells.tobytes()


def _choose(cells: bytes, vocab_size: int, stop_id: int, stop_one_in: int) -> int:
    digest = hashlib.sha256(cells).digest()
    if stop_one_in and int.from_bytes(digest[8:12], "little") % stop_one_in == 0:
        return stop_id
    return int.from_bytes(digest[:8], "little") % vocab_size


def _allowed(token: int, mask: Any, vocab_size: int) -> int:
    if mask is None:
        return token
    words = memoryview(mask).cast("B").cast("I")
    for step in range(vocab_size):
        candidate = (token + step) % vocab_size
        if words[candidate // 32] >> (candidate % 32) & 1:
            return candidate
    return token
