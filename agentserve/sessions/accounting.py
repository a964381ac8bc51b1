"""What is counted and logged of the turns that ended."""

import msgspec

from agentserve.wire import Turn


class Counters(msgspec.Struct):
    """Totals since the start."""

    turns: dict[str, int] = {}  # by status
    cached_tokens: int = 0
    prepared_tokens: int = 0
    new_tokens: int = 0
    recomputed: dict[str, int] = {}  # tokens by reason
    output_tokens: int = 0
    engine_restarts: int = 0

    def add(self, turn: Turn) -> None:
        """Count a turn that ended."""
        usage = turn.usage
        self.turns[turn.status] = self.turns.get(turn.status, 0) + 1
        self.cached_tokens += usage.cached_tokens
        self.prepared_tokens += usage.prepared_tokens
        self.new_tokens += usage.new_tokens
        self.output_tokens += usage.output_tokens
        for part in usage.recomputed:
            self.recomputed[part.reason] = self.recomputed.get(part.reason, 0) + part.tokens


def log_line(turn: Turn) -> str:
    """Return the one line that is logged of a turn: key=value, no text of the conversation."""
    usage, timing = turn.usage, turn.timing_ms
    recomputed = ",".join(f"{part.tokens}:{part.reason}" for part in usage.recomputed)
    rate = usage.output_tokens * 1000 / timing.decode if timing.decode else 0.0
    fields = {
        "session": turn.session,
        "turn": turn.id,
        "status": turn.status,
        "stop": turn.stop_reason or "-",
        "cached": usage.cached_tokens,
        "prepared": usage.prepared_tokens,
        "new": usage.new_tokens,
        "recomputed": recomputed or "0",
        "output": usage.output_tokens,
        "host": turn.kv.host,
        "queue_ms": timing.queue,
        "restore_ms": timing.restore,
        "ttft_ms": timing.ttft,
        "total_ms": timing.total,
        "tok_per_s": f"{rate:.1f}",
        "error": turn.error.code if turn.error else "-",
    }
    return " ".join(f"{key}={value}" for key, value in fields.items())
