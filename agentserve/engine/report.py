"""What the engine tells of itself: counters, occupancy of the tiers, where a sequence's KV is."""

from collections import Counter
from dataclasses import dataclass, field

from agentserve.engine.grammars import Grammars
from agentserve.engine.messages import Residency, Stats
from agentserve.engine.plan import RunnerInfo, Traffic
from agentserve.engine.scheduler import Scheduler
from agentserve.engine.sequence import Sequence, Turn
from agentserve.kv.chains import KvCache
from agentserve.kv.copies import DEVICE, HOST
from agentserve.kv.lookup import resident_tokens


@dataclass(slots=True)
class Counters:
    """Totals since the start, and the copier's last report."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    discarded_tokens: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # tokens computed again, by reason
    traffic: Traffic = field(default_factory=Traffic)


def stats_of(scheduler: Scheduler, kv: KvCache, grammars: Grammars, counters: Counters) -> Stats:
    """Return counts of turns, of slots (of KV group 0) and of work since the start."""
    pool, host = kv.pools[0], kv.host_pools[0]
    return Stats(
        step=scheduler.step,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        blocks_total=pool.total,
        blocks_free=pool.free,
        blocks_cached=pool.cached,
        blocks_locked=pool.locked,
        tokens_in_kv=pool.tokens,
        prefill_tokens=counters.prefill_tokens,
        decode_tokens=counters.decode_tokens,
        discarded_tokens=counters.discarded_tokens,
        preemptions=scheduler.preemptions,
        evictions=sum(pool.evictions for pool in kv.pools),
        loading=sum(turn.restoring for turn in scheduler.running),
        overdue=scheduler.waiting.overdue(),
        host_total=host.total,
        host_free=host.free,
        host_cached=host.cached,
        host_locked=host.locked,
        host_evictions=sum(pool.evictions for pool in kv.host_pools),
        saved_bytes=counters.traffic.saved_bytes,
        saved_s=counters.traffic.saved_s,
        loaded_bytes=counters.traffic.loaded_bytes,
        loaded_s=counters.traffic.loaded_s,
        copies_in_flight=len(kv.copies),
        stale_completions=kv.copies.stale,
        stall_s=scheduler.stall_s,
        lost=dict(counters.lost),
        compiling=len(grammars),
        grammar_bytes=grammars.cache_bytes,
        grammar_limit=grammars.cache_limit,
        grammars_compiled=grammars.compiled,
        grammars_refused=grammars.refused,
        compilers_ended=grammars.ended,
    )


def count_lost(turn: Turn, kv: KvCache, counters: Counters) -> tuple[int, str]:
    """Count the tokens that had KV before and must be computed again; return them, and why."""
    if not turn.lost:
        return 0, ""
    if turn.dropped:
        reason = "dropped"
    elif not kv.residency.policy.keeps:
        reason = "policy"
    else:
        reason = "host_full" if kv.host_pools[0].total else "evicted"
    counters.lost[reason] += turn.lost
    return turn.lost, reason


def residency_of(sequence: Sequence, info: RunnerInfo) -> Residency:
    """Return where the KV of `sequence` is (of group 0) and what was moved for it."""
    chain = sequence.chain
    block_bytes = info.groups[0].block_bytes
    return Residency(
        sequence=sequence.id,
        tokens=chain.length,
        device=resident_tokens(chain, DEVICE, info.block_size),
        host=resident_tokens(chain, HOST, info.block_size),
        saved_bytes=chain.saved * block_bytes,
        loaded_bytes=chain.loaded * block_bytes,
        stall_s=sequence.stall_s,
    )
