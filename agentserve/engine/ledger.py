"""What is open in an engine: its sequences, their turns, and what is to be told of them.

Turns end here and nowhere else, whatever ends them: their last token, a command, a fault.
"""

from agentserve.clock import Clock
from agentserve.engine.grammars import Grammars
from agentserve.engine.messages import Event, Finished
from agentserve.engine.report import Counters
from agentserve.engine.scheduler import Scheduler
from agentserve.engine.sequence import Sequence, Turn
from agentserve.kv.chains import KvCache


class Ledger:
    """Sequences and open turns by number, the events of the next batch, and the counters.

    Turns that wait for their grammar are in `grammars`, not in `turns`.
    """

    def __init__(self, scheduler: Scheduler, kv: KvCache, grammars: Grammars, clock: Clock) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.turns: dict[int, Turn] = {}
        self.events: list[Event] = []
        self.counters = Counters()
        self.grammars = grammars
        self._scheduler = scheduler
        self._kv = kv
        self._clock = clock

    def close(self, sequence_id: int) -> None:
        """Forget a sequence, cancelling its turn; unknown ones are ignored."""
        held = self.grammars.of_sequence(sequence_id)
        if held is not None:
            self.cancel(held.turn)
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.turn is not None:
            self.finish(sequence.turn, "cancelled")
        self._kv.close(sequence.chain)
        del self.sequences[sequence_id]

    def cancel(self, turn_id: int) -> None:
        """End a turn with what it has given; unknown ones are ignored."""
        turn = self.turns.get(turn_id)
        if turn is not None:
            self.finish(turn, "cancelled")
        elif (held := self.grammars.give_up(turn_id)) is not None:
            # It has changed nothing: of its log the engine has what it keeps of the one before.
            sequence = self.sequences.get(held.sequence)
            length = min(held.keep, sequence.chain.length) if sequence is not None else 0
            self.events.append(Finished(turn_id, "cancelled", held.keep, length))

    def finish(self, turn: Turn, reason: str, stop_id: int | None = None) -> None:
        """End an open turn, also under a row in flight; for `reason` see messages.Finished."""
        sequence = turn.sequence
        self._scheduler.remove(turn, discard=reason == "error")
        sequence.turn = None
        del self.turns[turn.id]
        sequence.stall_s += turn.restore_s
        if turn.recomputed:
            self.counters.lost["preempted"] += turn.recomputed
        now = self._clock.monotonic()
        if turn.command.max_tokens or not sequence.waits:  # a prefill in a wait does not end it
            sequence.chain.idle.since = now
        if turn.command.max_tokens:
            sequence.waits = True
            sequence.chain.idle.tools, sequence.chain.idle.expected_s = (), None
        first = turn.first_token_at if turn.first_token_at >= 0 else now
        started = turn.started_at if turn.started_at >= 0 else now
        self.events.append(
            Finished(
                turn=turn.id,
                reason=reason,
                log_length=len(sequence.log),
                kv_length=sequence.chain.length,
                stop_id=stop_id,
                message=turn.fault,
                prefill_s=first - started,
                decode_s=now - first,
                preemptions=turn.preemptions,
                recomputed=turn.recomputed,
                restore_s=turn.restore_s,
            )
        )
