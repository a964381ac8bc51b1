"""One running turn: engine events in, client events out, and the node that it would commit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from agentserve.engine.messages import Finished, Progress, Started, Tokens
from agentserve.engine.plan import pack
from agentserve.errors import AgentserveError
from agentserve.sessions.conversation import Call, Message
from agentserve.sessions.items import output_calls
from agentserve.sessions.logprobs import without_logprobs
from agentserve.sessions.mirror import Ahead
from agentserve.sessions.prompt import Fed, Prompt
from agentserve.sessions.recomputed import closed_list, divide
from agentserve.sessions.tree import Anchor, Entry, Pending, TurnNode, common_prefix
from agentserve.wire import (
    Context,
    Event,
    ItemDone,
    KvTokens,
    MalformedToolCallOut,
    OutputItem,
    ReasoningOut,
    Recomputed,
    TextOut,
    Timing,
    ToolCallOut,
    Turn,
    TurnProgress,
    TurnRequest,
    TurnStarted,
    Usage,
    error_body,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentserve.sessions.handle import TurnHandle
    from agentserve.sessions.mirror import SubmitOptions
    from agentserve.sessions.output import OutputStream
    from agentserve.sessions.session import Session

Keep = Literal["all", "sealed", "input", "none"]
StopReason = Literal[
    "end",
    "tool_calls",
    "max_tokens",
    "stop_sequence",
    "cancelled",
    "context_full",
    "failed_after_calls",
]


class Outcome(msgspec.Struct, frozen=True):
    """How a turn ends and what of it the session keeps."""

    status: Literal["completed", "incomplete", "cancelled", "failed"]
    stop_reason: StopReason | None
    keep: Keep
    error: AgentserveError | None = None


class Mark(msgspec.Struct, frozen=True):
    """A call that was sent: the output items and the generated ids up to its end."""

    call: Pending
    items: int
    ids: int


@dataclass
class TurnRun:
    """A turn between acceptance and its end. `number` names it at the engine seam."""

    number: int
    id: str
    session: Session
    request: TurnRequest
    handle: TurnHandle
    accepted_at: float  # monotonic seconds
    now_ms: int
    previous: str | None = None
    fed: Fed = field(default_factory=Fed)
    prompt: Prompt = field(default_factory=lambda: Prompt(array("i"), 0, ()))
    options: SubmitOptions | None = None
    make_output: Callable[[], OutputStream] | None = None  # until the turn is submitted
    output: OutputStream | None = None
    ahead: Ahead = field(default_factory=Ahead)  # what was prefilled of it before
    prepared: range = range(0)  # positions that were computed before the user message came
    fills_context: bool = False  # its output limit is the end of the context
    restarted: bool = False  # the engine's copy was lost before this turn
    held: int = 0  # tokens of the prompt that the engine's copy began with
    submitted: bool = False
    resubmitted: bool = False
    started: bool = False
    ending: bool = False
    cancel: Literal["none", "input", "partial"] | None = None
    generated: array[int] = field(default_factory=lambda: array("i"))
    marks: list[Mark] = field(default_factory=list)
    prompt_ids: dict[str, str] = field(default_factory=dict)  # wire call id -> the template's
    usage: Usage = field(default_factory=Usage)
    kv: KvTokens = field(default_factory=KvTokens)  # where the cached tokens were
    timing: Timing = field(default_factory=Timing)
    warnings: list[str] = field(default_factory=list)

    @property
    def prefills_only(self) -> bool:
        """Whether the turn generates nothing."""
        return self.request.max_output_tokens == 0

    def open_output(self) -> None:
        """Make ready for what the engine will say; done while it begins."""
        if self.make_output is not None:
            self.output, self.make_output = self.make_output(), None

    def sent_calls(self) -> tuple[Pending, ...]:
        """Return the calls whose `item.done` was sent."""
        return tuple(mark.call for mark in self.marks)

    def on_started(self, event: Started) -> None:
        """Count what is cached, new and recomputed, with reasons.

        What was prefilled ahead is cached and still new to the session; of what had to be computed
        there again, this turn tells.
        """
        self.started = True
        new = self.prompt.new_tokens
        extra = event.computed + self.ahead.computed - new
        ready = self.prepared
        self.usage = Usage(
            input_tokens=len(self.prompt.log),
            cached_tokens=event.cached,
            new_tokens=new,
            recomputed=self._reasons(extra, event),
            prepared_tokens=len(range(ready.start, min(ready.stop, event.cached))),
        )
        self.kv = KvTokens(device=event.cached - event.host, host=event.host)
        self.timing.queue = round(event.queue_s * 1000)
        usage = self.usage
        self.handle.publish(TurnStarted(usage.cached_tokens, new, usage.recomputed))

    def _reasons(self, extra: int, event: Started) -> list[Recomputed]:
        """Divide the `extra` tokens that were computed again, the surest cause first."""
        lost = [*self.ahead.lost, Recomputed(event.lost, event.reason)]
        causes = [Recomputed(part.tokens, closed_list(part.reason)) for part in lost]
        causes += self.prompt.moved
        if self.restarted:
            causes.append(Recomputed(extra, "engine_restarted"))
        had_kv = len(self.prompt.log) - self.prompt.new_tokens
        had_kv -= sum(part.tokens for part in self.prompt.moved)
        causes.append(Recomputed(had_kv - self.held, "history_edited"))
        causes.append(Recomputed(int(event.computed == 1), "last_token"))
        causes.append(Recomputed(extra, closed_list(event.reason)))
        return divide(extra, causes)

    def on_progress(self, event: Progress) -> None:
        """Tell how far the prefill is."""
        self.handle.publish(TurnProgress("prefill", event.done, event.total))

    def on_tokens(self, event: Tokens, now: float) -> bool:
        """Turn tokens into events; return whether the engine is to stop here."""
        if self.output is None or self.output.stopped is not None:
            return False
        if not self.generated:
            self.timing.ttft = round((now - self.accepted_at) * 1000)
        self.generated.extend(event.tokens)
        self._publish(self.output.push(event.tokens, event.logprobs))
        return self.output.stopped is not None

    def _publish(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ItemDone):
                self._mark(event)
            self.handle.publish(event)

    def _mark(self, event: ItemDone) -> None:
        if isinstance(event.item, ToolCallOut | MalformedToolCallOut):
            (call,) = output_calls((event.item,), self.prompt_ids, self.now_ms)
            self.marks.append(Mark(call, event.index + 1, len(self.generated)))

    def decide(self, finished: Finished | None, error: AgentserveError | None) -> Outcome:
        """Return how the turn ends, given the engine's last word or the error instead of it."""
        if error is not None:
            if any(mark.call.call_id in self.session.staged for mark in self.marks):
                return Outcome("incomplete", "failed_after_calls", "sealed", error)
            return Outcome("failed", None, "none", error)
        stopped = self.output.stopped if self.output is not None else None
        if (
            self.cancel is not None
            and stopped is None
            and (finished is None or finished.reason == "cancelled")
        ):
            keep: Keep = "none" if self.cancel == "none" else "input"
            if self.cancel == "partial" and self.generated:
                keep = "all"
            return Outcome("cancelled", "cancelled", keep)
        reason = finished.reason if finished is not None else "prefilled"
        if reason == "prefilled":
            return Outcome("completed", None, "input")
        if stopped == "stop_sequence":
            return Outcome("completed", "stop_sequence", "all")
        if reason == "length" and not self.fills_context:
            return Outcome("incomplete", "max_tokens", "all")
        if reason in ("length", "context"):
            return Outcome("incomplete", "context_full", "all")
        return Outcome("completed", "end", "all")

    def close_output(self, outcome: Outcome, finished: Finished | None) -> Outcome:
        """End the output stream and return the outcome with what it turned out to hold."""
        if outcome.keep != "all" or self.output is None:
            return outcome
        reason = self.output.stopped or (finished.reason if finished is not None else "cancelled")
        self._publish(self.output.finish(reason))
        if outcome.status == "cancelled" and not self.output.kept:
            return msgspec.structs.replace(outcome, keep="input")
        if outcome.stop_reason == "end" and self.marks:
            return msgspec.structs.replace(outcome, stop_reason="tool_calls")
        return outcome

    def count(self, finished: Finished | None) -> None:
        """Complete usage and times from the engine's last word."""
        self.usage.output_tokens = len(self.generated)
        self.usage.reasoning_tokens = self.output.reasoning_tokens if self.output else 0
        if finished is not None:
            # The engine's phases include the waits for copies, in a preempted turn both of them.
            restoring = finished.restore_s
            prefill_s = max(0.0, finished.prefill_s - restoring)
            decode_s = finished.decode_s - (restoring - (finished.prefill_s - prefill_s))
            self.timing.restore = round(restoring * 1000)
            self.timing.prefill = round(prefill_s * 1000)
            self.timing.decode = round(max(0.0, decode_s) * 1000)
            if again := finished.recomputed + self.ahead.preempted:
                preempted = Recomputed(again, "preempted")
                self.usage.recomputed = [*self.usage.recomputed, preempted]

    def sealed(self) -> Mark:
        """Return the last sent call that has a staged result."""
        staged = self.session.staged
        return [mark for mark in self.marks if mark.call.call_id in staged][-1]

    def kept_output(self, keep: Keep) -> list[OutputItem]:
        """Return the output items that stay."""
        if self.output is None or keep in ("none", "input"):
            return []
        return self.output.items if keep == "all" else self.output.items[: self.sealed().items]

    def node(self, outcome: Outcome, kv_length: int) -> tuple[TurnNode, array[int]]:
        """Return the node to commit after generation, and its log."""
        items = self.kept_output(outcome.keep)
        assert self.output is not None
        whole = outcome.keep == "all"
        kept = self.output.kept if whole else self.sealed().ids
        ids = self.generated[:kept]
        log = self.prompt.log + ids
        calls = output_calls(items, self.prompt_ids, self.now_ms)
        message = Message(
            role="assistant",
            text="".join(item.text for item in items if isinstance(item, TextOut)),
            reasoning="".join(item.text for item in items if isinstance(item, ReasoningOut)),
            calls=tuple(
                Call(self.prompt_ids[item.call_id], item.name, item.arguments)
                for item in items
                if isinstance(item, ToolCallOut)
            ),
            ids=pack(log[self._message_start() :]),
            body_start=self.output.body_start,
            tail=self.output.tail if whole else "",
        )
        before = len(self.session.tree.messages(self.session.head))
        count = before + len(self.fed.messages) + (self.fed.continues is None)
        entry = self._entry(items, (*self.fed.messages, message), calls)
        anchor = Anchor(len(log), count)
        continuable = outcome.stop_reason == "max_tokens" and not calls
        node = self._node(log, entry, anchor, (kv_length, continuable))
        return msgspec.structs.replace(node, reasons=self.output.in_reasoning), log

    def _message_start(self) -> int:
        """Return where in the log this turn's part of the message begins."""
        head = self.session.head
        continues = head is not None and self.fed.continues is not None
        return head.length if continues and head is not None else len(self.prompt.log)

    def input_node(self, log: array[int], kv_length: int) -> TurnNode:
        """Return the node that keeps only what was fed; `log` has no generation prompt."""
        head = self.session.head
        current = head is not None and head.tools_version == self.session.profile.tools_version
        anchor = head.anchor if head is not None and current else None
        kv_length = min(kv_length, common_prefix(self.prompt.log, log))
        entry = self._entry([], self.fed.messages, ())
        return self._node(log, entry, anchor, (kv_length, False))

    def prefilled_head(self, kv_length: int) -> TurnNode | None:
        """Return the head with more of its KV computed: nothing was fed, so no turn is added."""
        head = self.session.head
        if head is None:
            return None
        shared = common_prefix(self.session.tree.log(head), self.prompt.log)
        kv_length = max(head.kv_length, min(kv_length, shared))
        return msgspec.structs.replace(head, kv_length=kv_length, moved=())

    def _entry(
        self, items: list[OutputItem], messages: tuple[Message, ...], calls: tuple[Pending, ...]
    ) -> Entry:
        output = tuple(without_logprobs(items))
        return Entry(self.id, self.fed.items, output, messages, calls, self.fed.continues)

    def _node(
        self, log: array[int], entry: Entry, anchor: Anchor | None, rest: tuple[int, bool]
    ) -> TurnNode:
        head = self.session.head
        keep = common_prefix(self.session.tree.log(head), log)
        return TurnNode(
            id=self.id,
            parent=self.session.head_id,
            keep=keep,
            keep_entries=head.count if head is not None else 0,
            tokens=pack(log[keep:]),
            entries=(entry,),
            pending=entry.calls,
            anchor=anchor,
            kv_length=min(rest[0], len(log)),
            tools_version=self.session.profile.tools_version,
            continuable=rest[1],
        )

    def turn(self, outcome: Outcome | None, context: Context) -> Turn:
        """Return the turn as clients see it, running (None) or ended."""
        status = outcome.status if outcome else "running" if self.started else "queued"
        output = self.kept_output(outcome.keep) if outcome else self._output_so_far()
        kept = {item.call_id for item in output if not isinstance(item, TextOut | ReasoningOut)}
        calls = [call for call in self.sent_calls() if call.call_id in kept]
        return Turn(
            id=self.id,
            session=self.session.id,
            previous=self.previous,
            status=status,
            stop_reason=outcome.stop_reason if outcome else None,
            context=context,
            output=output,
            pending_calls=[call.wire() for call in self.session.unanswered(tuple(calls))],
            usage=self.usage,
            kv=self.kv,
            timing_ms=self.timing,
            warnings=self.warnings,
            metadata=self.request.metadata,
            error=error_body(outcome.error) if outcome and outcome.error else None,
        )

    def _output_so_far(self) -> list[OutputItem]:
        return list(self.output.items) if self.output is not None else []
