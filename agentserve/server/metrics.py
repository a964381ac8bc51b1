"""Prometheus metrics, in a registry of their own; levels are read when they are scraped."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentserve import wire
from agentserve.dialects.resolve import Resolver
from agentserve.dialects.responses.store import ResponseStore
from agentserve.engine.messages import Stats
from agentserve.server.idempotency import AnswerLedger
from agentserve.sessions.recomputed import REASONS, closed_list
from agentserve.sessions.service import SessionService

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
LOST = ("evicted", "host_full", "policy", "dropped", "preempted")  # what the engine itself counts
SESSION_STATES = ("idle", "queued", "running", "awaiting_tools", "closed")


class Metrics:
    """Counts what happens at the edge, and renders that and the service's own counts."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, service: SessionService, ledger: AnswerLedger) -> None:
        self._registry = CollectorRegistry()
        self._errors = Counter(
            "agentserve_errors", "Error answers by code.", ["code"], registry=self._registry
        )
        self._dropped = Counter(
            "agentserve_dropped_readers",
            "Event streams whose client stopped reading (stalled) or was too slow (behind).",
            ["reason"],
            registry=self._registry,
        )
        seconds = partial(self._histogram, SECONDS)
        self._ttft = seconds("ttft_seconds", "From the acceptance of a turn to its first token.")
        self._turn = seconds("turn_seconds", "From the acceptance of a turn to its end.")
        self._restore = seconds(
            "restore_seconds",
            "From the admission of a turn until its KV had come from the host tier.",
        )
        tokens = partial(self._histogram, TOKENS)
        self._input = tokens(
            "turn_input_tokens", "A turn's input by where its KV came from.", ["source"]
        )
        for source in ("device", "host", "computed"):
            self._input.labels(source)
        self._recomputed = tokens(
            "turn_recomputed_tokens", "Tokens that a turn had to compute again."
        )
        self._unknown_fields = Counter(
            "agentserve_unknown_fields",
            "Fields of dialect requests that mean nothing here, by dialect.",
            ["dialect"],
            registry=self._registry,
        )
        self._omitted = Counter(
            "agentserve_omitted_parts",
            "Images, tools of other kinds and the like that were left out of dialect requests.",
            ["dialect"],
            registry=self._registry,
        )
        self._registry.register(_ServiceCollector(service, ledger))

    def watch(self, resolver: Resolver, responses: ResponseStore) -> None:
        """Show what the dialects count, too."""
        self._registry.register(_DialectCollector(resolver, responses))

    def _histogram(
        self, buckets: Sequence[float], name: str, text: str, labels: Sequence[str] = ()
    ) -> Histogram:
        name = f"agentserve_{name}"
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def count_error(self, code: str) -> None:
        """Count an error answer; codes come from the closed catalogue."""
        self._errors.labels(code).inc()

    def count_unread(self, dialect: str, unknown_fields: int, omitted: int) -> None:
        """Count what of a dialect's request was not used."""
        self._unknown_fields.labels(dialect).inc(unknown_fields)
        self._omitted.labels(dialect).inc(omitted)

    def count_dropped_reader(self, reason: str) -> None:
        """Count a reader that was dropped."""
        self._dropped.labels(reason).inc()

    def observe_turn(self, turn: wire.Turn) -> None:
        """Take the times and tokens of a turn that ended."""
        self._turn.observe(turn.timing_ms.total / 1000)
        if turn.usage.output_tokens:
            self._ttft.observe(turn.timing_ms.ttft / 1000)
        if turn.kv.host:
            self._restore.observe(turn.timing_ms.restore / 1000)
        usage = turn.usage
        if usage.input_tokens:
            computed = usage.input_tokens - usage.cached_tokens
            sources = {"device": turn.kv.device, "host": turn.kv.host, "computed": computed}
            for source, tokens in sources.items():
                self._input.labels(source).observe(tokens)
            self._recomputed.observe(sum(part.tokens for part in usage.recomputed))

    def render(self) -> bytes:
        """Return the text format of everything."""
        return generate_latest(self._registry)


class _ServiceCollector(Collector):
    """Reads the service at each scrape."""

    def __init__(self, service: SessionService, ledger: AnswerLedger) -> None:
        self._service = service
        self._ledger = ledger

    def describe(self) -> Iterator[Metric]:
        """Say nothing ahead of time: names are fixed by `collect`."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the sessions' counts, then the engine's if it has spoken."""
        stats = self._service.stats()
        states = {state: stats.states.get(state, 0) for state in SESSION_STATES}
        yield _gauge("sessions", "Sessions by state.", "state", states)
        yield _single("open_turns", "Turns that are queued or running.", stats.open_turns)
        yield _single("ready", "1 when /ready answers 200.", int(stats.ready))
        yield _single(
            "heartbeat_age_seconds", "Since the engine was last heard.", stats.heartbeat_age_s
        )
        yield _single("store_bytes", "Bytes in the session store.", stats.store_bytes)
        yield _single("idempotency_bytes", "Bytes of answers kept for replay.", self._ledger.bytes)
        counters = stats.counters
        yield _counter("turns", "Turns that ended, by status.", "status", counters.turns)
        yield _counter(
            "recomputed_tokens",
            "Tokens prefilled although their KV had been computed, by reason.",
            "reason",
            dict.fromkeys(REASONS, 0) | counters.recomputed,
        )
        yield _total("cached_tokens", "Input tokens whose KV was kept.", counters.cached_tokens)
        yield _total(
            "prepared_tokens",
            "Cached tokens that were computed ahead of a user message.",
            counters.prepared_tokens,
        )
        yield _total("engine_restarts", "Engine restarts.", counters.engine_restarts)
        yield _total(
            "template_mismatches",
            "Prompts whose incremental render differed from the full one.",
            stats.template_mismatches,
        )
        if stats.engine is not None:
            yield from _engine(stats.engine)


class _DialectCollector(Collector):
    """Reads what the dialects count at each scrape."""

    def __init__(self, resolver: Resolver, responses: ResponseStore) -> None:
        self._resolver = resolver
        self._responses = responses

    def describe(self) -> Iterator[Metric]:
        """Say nothing ahead of time: names are fixed by `collect`."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the dialects' counts."""
        resolver = self._resolver
        yield _counter(
            "session_resolution",
            "Dialect requests by the surest signal that stood for their session.",
            "signal",
            resolver.resolved,
        )
        yield _single("dialect_sessions", "Sessions of dialect requests.", resolver.sessions)
        yield _total("dialect_evictions", "Those ended to make room.", resolver.evicted)
        yield _total(
            "dialect_lookups", "Answers of histories that were looked up.", resolver.lookups
        )
        yield _total(
            "dialect_imported_answers",
            "Answers of histories that no session had.",
            resolver.imported,
        )
        yield _single("stored_responses", "Responses that are kept.", len(self._responses))
        yield _single("stored_responses_bytes", "Their bytes.", self._responses.bytes)


def _engine(stats: Stats) -> Iterator[Metric]:
    blocks = {
        "free": stats.blocks_free,
        "cached": stats.blocks_cached,
        "locked": stats.blocks_locked,
    }
    yield _gauge("blocks", "KV blocks of the device by state.", "state", blocks)
    yield _single("tokens_in_kv", "Tokens held by blocks that are not free.", stats.tokens_in_kv)
    yield _single("running", "Turns in the engine's batch.", stats.running)
    yield _single("queue_depth", "Turns that wait for admission.", stats.waiting)
    tokens = {"prefill": stats.prefill_tokens, "decode": stats.decode_tokens}
    yield _counter("tokens", "Tokens computed by this engine, by phase.", "kind", tokens)
    yield _total("steps", "Engine steps.", stats.step)
    yield _total("preemptions", "Turns that gave up their KV for another.", stats.preemptions)
    yield _total("evictions", "Cached blocks given to new tokens.", stats.evictions)
    yield _single("overdue", "Turns that have waited for over 20 s and go first.", stats.overdue)
    yield from _grammars(stats)
    yield from _tiers(stats)


def _grammars(stats: Stats) -> Iterator[Metric]:
    yield _single("compiling", "Turns that wait for their grammar.", stats.compiling)
    yield _single("grammar_cache_bytes", "Bytes of compiled grammars.", stats.grammar_bytes)
    yield _single("grammar_cache_limit_bytes", "The most of these.", stats.grammar_limit)
    outcomes = {"compiled": stats.grammars_compiled, "refused": stats.grammars_refused}
    yield _counter("grammars", "Grammars by outcome.", "outcome", outcomes)
    yield _total(
        "grammar_compilers_ended",
        "Compilers that a grammar took too much of.",
        stats.compilers_ended,
    )


def _tiers(stats: Stats) -> Iterator[Metric]:
    blocks = {
        "free": stats.host_free,
        "cached": stats.host_cached,
        "locked": stats.host_locked,
    }
    yield _gauge("host_blocks", "KV blocks of the host tier by state.", "state", blocks)
    yield _total("host_evictions", "Host blocks given to others.", stats.host_evictions)
    yield _single("loading", "Admitted turns that wait for copies.", stats.loading)
    yield _single("copies_in_flight", "Copies between tiers.", stats.copies_in_flight)
    moved = {"save": stats.saved_bytes, "load": stats.loaded_bytes}
    yield _counter("copied_bytes", "Bytes copied to (save) and from the host.", "kind", moved)
    busy = {"save": stats.saved_s, "load": stats.loaded_s}
    yield _counter("copy_seconds", "Time that the copier was busy.", "kind", busy)
    yield _total("stall_seconds", "Time that turns have waited for copies.", stats.stall_s)
    yield _total(
        "stale_completions",
        "Ends of copies that nobody waited for any more.",
        stats.stale_completions,
    )
    lost = dict.fromkeys(LOST, 0)
    for reason, tokens in stats.lost.items():
        lost[closed_list(reason)] = lost.get(closed_list(reason), 0) + tokens
    yield _counter("lost_tokens", "Tokens whose KV the engine had given up.", "reason", lost)


def _single(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentserve_{name}", help_text, value=value)


def _total(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"agentserve_{name}", help_text, value=value)


def _gauge(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"agentserve_{name}", help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"agentserve_{name}", help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
