"""Commands to the engine and events from it: everything that crosses the engine seam.

A *sequence* is the engine's copy of a session's tokens. The server owns the tokens; a submit says
how many of the engine's tokens to keep and which follow. An engine that does not know the
(sequence, generation) pair answers Refused("unknown_sequence") and is then sent all tokens again
with keep=0. Token ids travel packed (`plan.pack`).
"""

from typing import Protocol

import msgspec

from agentserve.engine.plan import RunnerInfo, SamplingParams, TokenLogprobs

NOTHING_FITS = "grammar: no token can follow"  # message of a turn whose grammar has a dead end


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Cut the sequence to `keep` tokens, append `tokens`, and generate.

    keep=0 opens the sequence anew under `generation`. max_tokens=0 only prefills. `force` holds
    tokens that are taken instead of the sampled ones, one per step; when it is used up the turn
    goes on by sampling, so a caller that wants the turn to end there puts a stop id last.
    `grammar` is opaque to the loop: a process of its own compiles it, and the submit changes
    nothing until it has. It begins before the last `said` tokens of the prompt; with `anew`, after
    them where they do not fit. A `background` turn
    only prefills (max_tokens=0), in steps that nobody else wants and in blocks that are free: it
    pauses while others run, and ends early, as "prefilled" with the kv_length that it reached, when
    no free block is left.
    """

    turn: int
    sequence: int
    generation: int
    keep: int
    tokens: bytes
    namespace: str
    max_tokens: int
    stop_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    grammar: str | None = None
    said: int = 0
    anew: bool = False
    force: bytes = b""
    background: bool = False


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Open sequence `into` with the first `keep` tokens of `sequence`, sharing its blocks."""

    sequence: int
    generation: int
    into: int
    into_generation: int
    keep: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Forget the sequence and its private blocks; full blocks stay in the prefix index."""

    sequence: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End the turn with the tokens that it has given; unknown turns are ignored."""

    turn: int


class Hint(msgspec.Struct, frozen=True, tag="hint"):
    """What is known of the wait between two turns of a sequence; replaces the last one of it.

    `tools` names what is waited for, one key a call (empty: a person, or unknown): the engine
    learns how long each takes. `expected_s` is what the client expects, from now on. kv: "auto" |
    "device" (keep it there while there is room) | "host" (make room now) | "drop" (forget it).
    """

    sequence: int
    tools: list[str] = []
    expected_s: float | None = None
    kv: str = "auto"


class Promote(msgspec.Struct, frozen=True, tag="promote"):
    """A turn of this sequence is about to come: bring its KV to the device.

    Never takes room from a running or queued turn. With begin=False the turn will not come after
    all: what has not been copied yet stays where it is.
    """

    sequence: int
    begin: bool = True


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Ask where the KV of these sequences is; answered by one Inspected with the same number."""

    number: int
    sequences: list[int]


Command = Submit | Fork | Close | Cancel | Hint | Promote | Inspect


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is up. The first event; comes again with a higher incarnation after a restart."""

    info: RunnerInfo
    incarnation: int


class Down(msgspec.Struct, frozen=True, tag="down"):
    """The engine died; every open turn is lost. Made by the link, not by the engine."""

    reason: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The turn was admitted: `cached` tokens have KV, `computed` will be prefilled.

    `host` of the cached tokens are on their way from the host tier. `lost` of the computed ones had
    KV when the last turn of the sequence ended; `reason` says why not any more: "evicted" (there is
    no host tier), "host_full", "policy" (the policy "none" keeps nothing), "dropped" (the hint
    kv="drop").
    """

    turn: int
    cached: int
    computed: int
    queue_s: float
    host: int = 0
    lost: int = 0
    reason: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Prefill advanced: `done` of `total` tokens that had to be computed."""

    turn: int
    done: int
    total: int


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Tokens that this step gave to the turn, stop token excluded; `logprobs` if it asks."""

    turn: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The turn ended.

    reason: "stop" (a stop id was sampled; it is not in the log) | "length" (max_tokens) |
    "context" (no room for another token) | "prefilled" (max_tokens was 0) | "cancelled" |
    "error" (this turn alone failed; `message` says why).
    log_length and kv_length: tokens in the engine's log and how many of them have KV.
    """

    turn: int
    reason: str
    log_length: int
    kv_length: int
    stop_id: int | None = None
    message: str = ""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0
    recomputed: int = 0  # tokens prefilled again after a preemption
    restore_s: float = 0.0  # from the admission until the last block had come from the host


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The submit or fork was not accepted and changed nothing.

    code: unknown_sequence | context_full | exceeds_kv_capacity | overloaded | bad_grammar |
    no_compiler (it does not start) | busy
    (a turn of that sequence is running) | invalid (ids out of the vocabulary, empty prompt, ...).
    For a fork `turn` is -1 and `sequence` is `into`.
    """

    turn: int
    sequence: int
    code: str
    message: str


class Residency(msgspec.Struct, frozen=True):
    """Where one sequence's KV is: tokens by tier (a token can be in both), and what was moved."""

    sequence: int
    tokens: int
    device: int
    host: int
    saved_bytes: int
    loaded_bytes: int
    stall_s: float  # time that its turns have waited for copies


class Inspected(msgspec.Struct, frozen=True, tag="inspected"):
    """The answer to Inspect; sequences that the engine does not know are left out."""

    number: int
    sequences: list[Residency]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Engine state, sent with every event batch and at least once a second: the heartbeat."""

    step: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_locked: int
    tokens_in_kv: int  # tokens held by blocks that are not free
    prefill_tokens: int  # counters since start
    decode_tokens: int
    preemptions: int
    evictions: int  # device blocks given to somebody else
    discarded_tokens: int = 0  # computed for turns that had ended by then (a step late)
    loading: int = 0  # admitted turns that wait for copies
    overdue: int = 0  # turns that have waited for admission for too long and go first
    host_total: int = 0
    host_free: int = 0
    host_cached: int = 0
    host_locked: int = 0
    host_evictions: int = 0
    saved_bytes: int = 0
    saved_s: float = 0.0
    loaded_bytes: int = 0
    loaded_s: float = 0.0
    copies_in_flight: int = 0
    stale_completions: int = 0
    stall_s: float = 0.0  # time that turns have waited for copies
    lost: dict[str, int] = {}  # tokens computed again, by reason
    compiling: int = 0  # turns that wait for their grammar
    grammar_bytes: int = 0  # of compiled grammars that are kept
    grammar_limit: int = 0
    grammars_compiled: int = 0
    grammars_refused: int = 0
    compilers_ended: int = 0  # by grammars that took too much


Event = Ready | Down | Started | Progress | Tokens | Finished | Refused | Inspected | Stats


class EngineLink(Protocol):
    """The server's end of the seam; the engine behind it is a thread or a process."""

    def send(self, command: Command) -> None:
        """Queue a command; never blocks. Commands sent while the engine is down are dropped."""
        ...

    async def receive(self) -> list[Event]:
        """Return the next batch of events (at least one)."""
        ...

    async def close(self) -> None:
        """Stop the engine and free what it holds."""
        ...
