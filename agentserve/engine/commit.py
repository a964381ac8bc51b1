"""What the result of a step does: KV and tokens are logged, turns go on or end."""

from agentserve.clock import Clock
from agentserve.engine.ledger import Ledger
from agentserve.engine.messages import Progress, Tokens
from agentserve.engine.plan import StepResult, TokenLogprobs
from agentserve.engine.scheduler import Batch
from agentserve.engine.sequence import Turn
from agentserve.kv.chains import KvCache


class Committer:
    """Commits the steps of one engine, in the order of their plans."""

    def __init__(self, ledger: Ledger, kv: KvCache, clock: Clock) -> None:
        self._ledger = ledger
        self._kv = kv
        self._clock = clock

    def commit(self, batch: Batch, result: StepResult) -> None:
        """Take what the rows of `batch` gave. A row whose turn is over by now gives nothing."""
        for number, (row, turn) in enumerate(zip(batch.plan.rows, batch.turns, strict=True)):
            if not turn.running:  # it ended while the row was in flight, and never runs again
                self._ledger.counters.discarded_tokens += row.count
                continue
            turn.flying -= row.count
            turn.coming -= row.sample
            self._count(row.count, turn)
            if not result.finite[number]:
                turn.fault = "the model gave a value that is not finite"
            if turn.fault:
                self._ledger.finish(turn, "error")
                continue
            sequence = turn.sequence
            length = row.start + row.count
            self._kv.commit(sequence.chain, sequence.log, length)
            self._report_progress(turn, length)
            if row.sample:
                logprobs = result.logprobs[number] if result.logprobs else []
                self._accept(turn, result.tokens[number], logprobs)
            elif length == len(sequence.log):
                self._ledger.finish(turn, "prefilled")

    def _count(self, computed: int, turn: Turn) -> None:
        if turn.generated and computed == 1:
            self._ledger.counters.decode_tokens += 1
        else:
            self._ledger.counters.prefill_tokens += computed

    def _report_progress(self, turn: Turn, length: int) -> None:
        done = min(length, turn.prompt_length) - turn.cached
        if done > turn.reported:
            turn.reported = done
            self._ledger.events.append(Progress(turn.id, done, turn.prompt_length - turn.cached))

    def _accept(self, turn: Turn, sampled: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Log what the step sampled, or the forced token instead, up to what ends the turn."""
        if turn.first_token_at < 0:
            turn.first_token_at = self._clock.monotonic()
        given: list[int] = []
        reason, stop_id = "", None
        for token in sampled:
            if turn.generated < len(turn.forced):
                token = turn.forced[turn.generated]
            if token in turn.stop_ids:
                reason, stop_id = "stop", token
                break
            try:
                if turn.matcher is not None:
                    turn.matcher.accept(token)
            except Exception as error:  # a grammar's fault stays with its turn
                reason, turn.fault = "error", f"grammar: {error}"
                break
            turn.sequence.log.append(token)
            turn.generated += 1
            given.append(token)
            reason = _limit(turn)
            if reason:
                break
        if given:
            self._ledger.events.append(Tokens(turn.id, given, logprobs[: len(given)]))
        if reason:
            self._ledger.finish(turn, reason, stop_id)


def _limit(turn: Turn) -> str:
    """Return why no further token can follow, or an empty string."""
    if turn.generated >= turn.command.max_tokens:
        return "length"
    return "context" if len(turn.sequence.log) >= turn.limit else ""
