"""Section `batching`: our engine and transformers' continuous batching on the same trace.

Agents in a closed loop: each turn sends the whole history and something new, and takes an answer of
fixed length. Both run a model of the same shape with random weights, greedy, so no answer ends by
itself. transformers' manager is used as its documentation advises, with its prefix cache on.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from agentserve.clock import SystemClock
from agentserve.config import EngineSettings
from agentserve.engine.loop import Engine
from agentserve.engine.messages import Finished, Refused, Submit, Tokens
from agentserve.engine.plan import pack
from benchmarks.gpu.model import load
from benchmarks.gpu.play import make_runner
from benchmarks.gpu.report import Report
from benchmarks.gpu.sizes import GPU_MODEL, TINY_MODEL, Measured

PATIENCE_S = 40.0  # for all turns of one system
SHARED_SEED = 7


@dataclass(frozen=True)
class Turn:
    """What a system is told: a turn of a session, the tokens kept before it, and the new ones."""

    session: int
    kept: int
    tokens: list[int]


class Agents:
    """The closed loops: who sends what next, and when each turn began and ended."""

    def __init__(self, sizes: Measured) -> None:
        self._sizes = sizes
        self._logs: list[list[int]] = [[] for _ in range(sizes.sessions)]
        self._left = [sizes.turns] * sizes.sessions
        self._began: dict[int, float] = {}
        self.turn_s: list[float] = []
        self.start = time.perf_counter()

    @property
    def over(self) -> bool:
        return not any(self._left)

    def first(self) -> list[Turn]:
        return [self._next(session) for session in range(self._sizes.sessions)]

    def answered(self, session: int, tokens: list[int]) -> Turn | None:
        """Take a turn's answer; return the session's next turn."""
        if len(tokens) != self._sizes.output:
            raise ValueError(f"an answer of {len(tokens)} tokens, not {self._sizes.output}")
        self.turn_s.append(time.perf_counter() - self._began[session])
        self._logs[session] += tokens
        self._left[session] -= 1
        return self._next(session) if self._left[session] else None

    def history(self, session: int) -> list[int]:
        return self._logs[session]

    def result(self) -> dict[str, Any]:
        makespan = time.perf_counter() - self.start
        return {
            "makespan_s": round(makespan, 4),
            "turn_p50_s": round(statistics.median(self.turn_s), 4),
            "turns": len(self.turn_s),
            "tokens_s": round(len(self.turn_s) * self._sizes.output / makespan, 1),
        }

    def _next(self, session: int) -> Turn:
        log, sizes = self._logs[session], self._sizes
        vocab = range(sizes.model.vocab_size)
        new = random.Random(f"{session} {len(log)}").choices(vocab, k=sizes.new)
        if not log:
            new = random.Random(SHARED_SEED).choices(vocab, k=sizes.shared) + new
        turn = Turn(session, len(log), new)
        log += new
        self._began[session] = time.perf_counter()
        return turn


def run(report: Report, options: argparse.Namespace) -> None:
    """Run both, ours first; each twice, because the first time compiles."""
    sizes, device = (TINY_MODEL if options.tiny else GPU_MODEL), options.device
    for name, make in (("ours", Ours), ("transformers", Transformers)):
        report.part(name, lambda make=make: measured(make, sizes, device))
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    both = [report.values.get(name, {}).get("makespan_s") for name in ("ours", "transformers")]
    if all(both):
        report.put(speedup=round(both[1] / both[0], 3))


def measured(make: Callable[..., Any], sizes: Measured, device: str) -> dict[str, Any]:
    """Return the figures of the second run on one system; its prefix cache is empty in both."""
    system = make(sizes, device)
    try:
        for _ in range(2):
            agents = Agents(sizes)
            system.run(agents)
    finally:
        system.close()
    return agents.result()


class Ours:
    """The engine, stepped here; every run has its own sequences and namespace."""

    def __init__(self, sizes: Measured, device: str) -> None:
        runner = make_runner(load(sizes, device), sizes.sessions)
        self._engine = Engine(runner, SystemClock(), EngineSettings())
        self._sizes = sizes
        self._runs = 0
        self._turn = 0

    def run(self, agents: Agents) -> None:
        self._runs += 1
        turns: dict[int, int] = {}
        answers: dict[int, list[int]] = {}
        for turn in agents.first():
            self._submit(turn, turns, answers)
        until = time.perf_counter() + PATIENCE_S
        while not agents.over:
            if time.perf_counter() > until:
                raise TimeoutError(f"not over after {PATIENCE_S} s")
            for event in self._engine.step():
                if isinstance(event, Tokens):
                    answers[event.turn] += event.tokens
                elif isinstance(event, Refused):
                    raise RuntimeError(event)  # noqa: TRY004
                elif isinstance(event, Finished):
                    after = agents.answered(turns[event.turn], answers[event.turn])
                    if after is not None:
                        self._submit(after, turns, answers)
        while self._engine.busy:
            self._engine.step()

    def close(self) -> None:
        """Nothing runs by itself."""

    def _submit(self, turn: Turn, turns: dict[int, int], answers: dict[int, list[int]]) -> None:
        self._turn += 1
        turns[self._turn], answers[self._turn] = turn.session, []
        self._engine.apply(
            Submit(
                turn=self._turn,
                sequence=turn.session + 1,
                generation=self._runs,
                keep=turn.kept,
                tokens=pack(turn.tokens),
                max_tokens=self._sizes.output,
                stop_ids=[],
                namespace=f"run {self._runs}",
            )
        )


class Transformers:
    """A ContinuousBatchingManager; its thread runs, this one sends turns and waits for answers."""

    def __init__(self, sizes: Measured, device: str) -> None:
        from transformers.generation import ContinuousBatchingConfig, GenerationConfig

        options = {} if device != "cpu" else {"num_blocks": 16, "max_batch_tokens": 64}
        self._sizes = sizes
        self._runs = 0
        self._manager = transformers_model(sizes, device).init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(**options),
        )
        self._manager.start()

    def run(self, agents: Agents) -> None:
        self._runs += 1
        for turn in agents.first():
            self._send(agents, turn)
        until = time.perf_counter() + PATIENCE_S
        while not agents.over:
            if time.perf_counter() > until:
                raise TimeoutError(f"not over after {PATIENCE_S} s")
            output = self._manager.get_result(timeout=1)
            if output is None:
                continue
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.is_finished():
                session = int(output.request_id.split()[1])
                after = agents.answered(session, list(output.generated_tokens))
                if after is not None:
                    self._send(agents, after)

    def close(self) -> None:
        self._manager.stop(block=True, timeout=5)

    def _send(self, agents: Agents, turn: Turn) -> None:
        # Its prefix cache has no namespaces: a first token of its own keeps the runs apart.
        ids = [self._runs, *agents.history(turn.session)[1:]]
        self._manager.add_request(
            ids,
            request_id=f"{self._runs} {turn.session} {turn.kept}",
            max_new_tokens=self._sizes.output,
            eos_token_id=-1,
        )


def transformers_model(sizes: Measured, device: str) -> Any:
    """Return transformers' model of the same shape, with random weights made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = sizes.model
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.inner_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        attn_implementation="sdpa",
        dtype=sizes.dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(sizes.dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
