"""The step contract: all that crosses from deciding to doing, and back.

A StepPlan is ints and bytes only, so that it can be sent to worker processes later. Runners keep
the block tables: a plan names only the block ids that were appended since the last plan.
Token ids travel as little-endian int32 bytes.
"""

from array import array
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import msgspec

MOST_LOGPROBS = 20  # tokens at a place whose log probabilities can be asked for
SAMPLED = -1  # in StepPlan.tokens: what the slot's row of the step before has sampled


def pack(tokens: SequenceOf[int]) -> bytes:
    """Return `tokens` as little-endian int32 bytes."""
    return array("i", tokens).tobytes()


def unpack(data: bytes) -> "array[int]":
    """Return the token ids of `pack`."""
    tokens: array[int] = array("i")
    tokens.frombytes(data)
    return tokens


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    Penalties: repetition (CTRL, arXiv 1909.05858) looks at prompt and output; presence and
    frequency look at the output of this turn only. A draw depends on (seed, position) alone.
    `logprobs` asks for log probabilities: of each token, and of so many of the likeliest there.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None  # up to MOST_LOGPROBS

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class SlotAdd(msgspec.Struct, frozen=True):
    """A sequence enters batch slot `slot`; its block table starts empty, one list per KV group.

    `history` holds the tokens before the first row, packed, only if the sampling needs them;
    `prompt_length` is where this turn's output begins (for presence and frequency penalties).
    `forced` holds the tokens from there on that are taken instead of the sampled ones, packed, only
    if their log probabilities are asked for: the runner samples all the same.
    """

    slot: int
    generation: int
    sampling: SamplingParams
    prompt_length: int
    history: bytes = b""
    forced: bytes = b""

    def forced_at(self, position: int) -> int:
        """Return the token that is taken at `position` whatever is sampled, else SAMPLED."""
        place = 4 * (position - self.prompt_length)
        given = unpack(self.forced[place : place + 4])
        return given[0] if given else SAMPLED


class SlotDrop(msgspec.Struct, frozen=True):
    """The sequence leaves the slot; nothing of it may be read again."""

    slot: int
    generation: int


class TableAppend(msgspec.Struct, frozen=True):
    """Device block ids appended to a slot's table in one KV group."""

    slot: int
    group: int
    blocks: list[int]


class Copy(msgspec.Struct, frozen=True):
    """Copy the first `tokens` tokens of block `source` to block `target`; see `kind`.

    "device": device to device, before this step's rows, in list order; done when the step is.
    "save": device to host, "load": host to device. These run beside steps, at any later time and in
    any order, but after all rows of earlier plans; `ticket` comes back in the result of a step that
    is collected later. What a save reads and what a load writes is not touched by any row of this
    or of a later plan until then.
    """

    ticket: int
    group: int
    source: int
    target: int
    tokens: int
    kind: str = "device"


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Compute `count` tokens of `slot` at positions start..start+count-1; sample after the last."""

    slot: int
    start: int
    count: int
    sample: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. Order for the runner: dropped, added, appended, copies, rows.

    `tokens` are the input tokens of all rows, one after the other, packed. At depth 1 the token of
    a single-token row can be SAMPLED: it is what the row of the same slot in the step before, which
    is in flight, has sampled. The host does not know it; the runner keeps it on the device, and for
    penalties counts it there. If that row was not finite, or if its turn has ended, any id of the
    vocabulary will do.
    """

    step: int
    dropped: list[SlotDrop]
    added: list[SlotAdd]
    appended: list[TableAppend]
    copies: list[Copy]
    rows: list[Row]
    tokens: bytes
    wait: bool = False  # nothing to compute: `collect` waits a moment for a copy to end
    overdue: list[int] = []  # tickets to report again if their copies have ended


class Traffic(msgspec.Struct, frozen=True):
    """What the copier has moved between tiers since the start, and how long it was busy."""

    saved_bytes: int = 0
    saved_s: float = 0.0
    loaded_bytes: int = 0
    loaded_s: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was at its place, and the likeliest ones there, the first one first.

    Natural logarithms of the softmax, float32, of the model's own logits: before penalties, biases,
    masks and temperature.
    """

    logprob: float
    top: list[int] = []
    top_logprobs: list[float] = []


class StepResult(msgspec.Struct, frozen=True):
    """What a step gave: per row a list of tokens (empty when the row does not sample).

    `logprobs` has, if any row asks for them, one for each of these tokens in the rows that ask.
    """

    step: int
    tokens: list[list[int]]
    finite: list[bool]  # per row: False when a logit was NaN or infinite
    tickets: list[int]  # copies that have ended since the last result
    traffic: Traffic = Traffic()
    logprobs: list[list[TokenLogprobs]] = []


class KvGroup(msgspec.Struct, frozen=True):
    """Layers whose KV lives in one kind of block. Today: one group of kind "full"."""

    kind: str
    layers: int
    block_bytes: int


class RunnerInfo(msgspec.Struct, frozen=True):
    """What the decisions need to know of a runner."""

    model: str
    identity: str  # changes whenever the same tokens would give other KV (weights, dtype, rope)
    vocab_size: int
    max_context: int  # tokens
    block_size: int  # tokens
    num_blocks: int  # device blocks per group
    max_slots: int
    groups: list[KvGroup]
    dtype: str = "float32"
    device: str = "cpu"
    weight_bytes: int = 0
    host_blocks: int = 0  # blocks of the host tier per group; 0: there is none
    step_tokens: int = 512  # computed in one step, unless the settings say
    depth: int = 0  # 0 | 1: steps in flight when the next one is launched, see Runner


class Runner(Protocol):
    """Executes plans, in order. A handle is opaque and belongs to one plan.

    At depth 0 the calls are launch(1), sample(1), collect(1), launch(2), ... At depth 1, where
    `launch` and `sample` only queue work on a device:

        launch(1) sample(1) | launch(2) collect(1) sample(2) | launch(3) collect(2) sample(3) | ...

    - Work runs in the order of the calls, as on one stream; only saves and loads run beside it. A
      step ends with its sampling; `sample` is called for every step.
    - What `launch` is told of slots and tables holds for its own and later steps. What an earlier
      step in flight uses must not change under it: neither its tables nor its staging buffers.
    - `collect` waits for its own step, not for one launched since; by then a slot of its rows may
      have been dropped or have got another sequence.
    - A row is computed as planned even if its turn has ended since: its result is ignored. It
      writes KV, before any work that is launched later, where nobody reads it.
    - Saves and loads may be reported by any `collect` after their launch.
    """

    info: RunnerInfo

    def launch(self, plan: StepPlan) -> Any:
        """Start the forward pass and return a handle; at depth 1 without waiting for it."""
        ...

    def sample(self, handle: Any, masks: dict[int, Any]) -> None:
        """Sample the rows that ask for it; at depth 1 without waiting for that.

        `masks` maps a row index to a packed bitmask: little-endian int32 words, bit i of word w
        allows token 32*w + i (xgrammar's layout), as a bytes-like object.
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step to end and return its result."""
        ...
