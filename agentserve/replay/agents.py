"""Closed-loop agents under a residency policy: equal work on a server of its own, and its counters.

Every run starts a fresh server, so that none finds the KV of the one before. What it moved and
computed is read from the server's own metrics after the last turn.
"""

import asyncio

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from agentserve.model.prepare import prepare
from agentserve.model.spec import load_spec
from agentserve.replay.generator import Workload, generate
from agentserve.replay.report import Report, percentile
from agentserve.replay.runner import Observer, ReplayError, ReplaySettings, replay
from agentserve.replay.server import own_server

KV_ITEM_BYTES = 2  # bfloat16, what a server stores unless told otherwise


class Tiers(msgspec.Struct, frozen=True):
    """How a server keeps the KV of its sessions: the policy, and the room in tokens."""

    policy: str  # of `serve --kv-policy`
    device_tokens: int
    host_tokens: int = 0  # 0: no host tier

    def options(self, token_bytes: int) -> tuple[str, ...]:
        """Return the options of `agentserve serve` for a model of so many KV bytes a token."""
        device = str(self.device_tokens * token_bytes)
        host = str(self.host_tokens * token_bytes)
        return ("--kv-policy", self.policy, "--kv-device", device, "--kv-host", host)


class Figures(msgspec.Struct, frozen=True):
    """What one run took. Tokens are the server's counts, seconds are the clients'."""

    makespan_s: float
    ttft_p50_s: float
    turn_p50_s: float
    turn_p95_s: float
    tool_ttft_p50_s: float  # of the turns that begin with a tool's result
    tool_ttft_p95_s: float
    new_tokens: int
    prefill_computed: int  # by the engine: preempted work that it did twice counts twice
    recomputed: int  # of those, tokens that had been computed before
    restored_tokens: int  # input tokens that came back from the host tier
    saved_bytes: int  # copied to the host tier
    loaded_bytes: int  # copied from it
    copy_s: float  # that the copier was busy, both ways
    output_tokens: int


class AgentsRun(msgspec.Struct, frozen=True):
    """One finished run; counters are the server's metrics by name and label."""

    report: Report
    counters: dict[str, float]

    def figures(self) -> Figures:
        """Return the run in numbers."""
        totals = self.report.totals()
        records = self.report.records
        after_tools = [record.ttft_s for record in records if record.index > 1]
        return Figures(
            makespan_s=totals.makespan_s,
            ttft_p50_s=totals.ttft_p50_s,
            turn_p50_s=totals.turn_p50_s,
            turn_p95_s=totals.turn_p95_s,
            tool_ttft_p50_s=percentile(after_tools, 50),
            tool_ttft_p95_s=percentile(after_tools, 95),
            new_tokens=totals.new_tokens,
            prefill_computed=round(self.counters["agentserve_tokens_total{kind=prefill}"]),
            recomputed=sum(sum(record.recomputed.values()) for record in records),
            restored_tokens=sum(record.restored_tokens for record in records),
            saved_bytes=round(self.counters["agentserve_copied_bytes_total{kind=save}"]),
            loaded_bytes=round(self.counters["agentserve_copied_bytes_total{kind=load}"]),
            copy_s=sum(
                self.counters[f"agentserve_copy_seconds_total{{kind={kind}}}"]
                for kind in ("save", "load")
            ),
            output_tokens=totals.output_tokens,
        )

    def working_set(self) -> int:
        """Return the distinct tokens that all sessions have at their ends, the shared prompt once.

        The prompt's size is what a session's first turn found in the prefix cache, at most.
        """
        records = sorted(self.report.records, key=lambda record: record.index)
        ends = {record.session: record.input_tokens + record.output_tokens for record in records}
        shared = max(record.cached_tokens for record in records if record.index == 1)
        return sum(ends.values()) - (len(ends) - 1) * shared


def run_agents(model: str, workload: Workload, tiers: Tiers, observer: Observer) -> AgentsRun:
    """Serve `model` with these tiers, let the workload's agents play, stop the server.

    For the main thread only. Raises OSError when the server does not start, ReplayError when an
    agent does not get to its end.
    """
    with own_server(model, *tiers.options(token_bytes(model))) as url:
        return asyncio.run(play(url, workload, observer))


async def play(url: str, workload: Workload, observer: Observer) -> AgentsRun:
    """Let the workload's agents play on a server that nobody else uses.

    The seed decides what is said and how long each tool takes, whoever serves. Raises ReplayError
    when an agent does not get to its end.
    """
    report = await replay(generate(workload), url, ReplaySettings(), observer)
    if report.incomplete:
        raise ReplayError("; ".join(report.incomplete))
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        answer = (await http.get("/metrics")).raise_for_status()
    return AgentsRun(report, read_counters(answer.text))


def read_counters(text: str) -> dict[str, float]:
    """Return the samples of a Prometheus text, histograms left out, as `name{label=value}`."""
    counters = {}
    for family in text_string_to_metric_families(text):
        if family.type == "histogram":
            continue
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            counters[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return counters


def token_bytes(model: str) -> int:
    """Return the bytes of KV that one token of the model takes."""
    spec = load_spec(prepare(model))
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * KV_ITEM_BYTES
