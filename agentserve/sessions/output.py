"""What a turn generates: token ids in, items and events out, the same streamed and unstreamed."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from agentserve import wire
from agentserve.engine.plan import TokenLogprobs
from agentserve.sessions.cut import Ledger, StopFinder
from agentserve.sessions.emitter import Emitter
from agentserve.sessions.logprobs import Logprobs
from agentserve.sessions.scan import Scanner
from agentserve.sessions.tokenizer import Detokenizer, Tokenizer
from agentserve.sessions.toolformat import ToolFormat


class OutputStream:
    """The output of one turn.

    `items` are the finished items. `stopped` says that generation is to end although the model
    goes on: "stop_sequence" or "tool_calls". After `finish`: the first `kept` ids belong to the
    log, `tail` is the text of a token that was split there, and what follows the reasoning begins
    at id `body_start`.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each thing that changes the output
        self,
        tokenizer: Tokenizer,
        format: ToolFormat,
        tools: Mapping[str, wire.Tool],
        *,
        stop: Sequence[str] = (),
        mint_call: Callable[[], str],
        mint_item: Callable[[], str],
        parallel: bool = True,
        tools_on: bool = True,
        in_reasoning: bool = False,
        triggers: Sequence[str] = (),
        openings: Sequence[str] = (),
    ) -> None:
        self.stopped: str | None = None
        self.kept = 0
        self.tail = ""
        self._ledger = Ledger(Detokenizer(tokenizer))
        self._stop = StopFinder(stop)
        self._logprobs = Logprobs(tokenizer, self._ledger)
        parallel = parallel and not format.one_call
        self._emitter = Emitter(tools, mint_call, mint_item, parallel, self._logprobs.take)
        self._scanner = Scanner(
            format,
            tools,
            self._emitter,
            tools_on=tools_on,
            in_reasoning=in_reasoning,
            triggers=triggers,
            openings=openings,
        )
        self._end: int | None = None  # where the output was cut

    @property
    def items(self) -> list[wire.OutputItem]:
        """The items that are finished."""
        return self._emitter.items

    @property
    def in_reasoning(self) -> bool:
        """Whether reasoning is open."""
        return self._scanner.in_reasoning

    @property
    def reasoning_tokens(self) -> int:
        """Ids that were spent on reasoning, its tags included."""
        if self._scanner.in_reasoning:
            return self._ledger.count
        return self._ledger.ids_before(self._emitter.reasoning_end_at)

    @property
    def body_start(self) -> int:
        """Index of the first id after the reasoning and the white space that follows it."""
        end = self._emitter.reasoning_end_at
        return self._ledger.ids_before(self._ledger.next_word(end)) if end else 0

    def push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[wire.Event]:
        """Take generated ids (stop tokens excluded); return what they give to the client.

        logprobs: one for each id, or none at all.
        """
        for token, beside in zip_longest(ids, logprobs):
            if self.stopped is not None:
                break
            if beside is not None:
                self._logprobs.push(token, beside)
            self._scan(self._ledger.push(token))
        return self._emitter.take_events()

    def finish(self, reason: str) -> list[wire.Event]:
        """End the output and return the last events.

        `reason` is the engine's, or `stopped`. An open call becomes a malformed one; when the turn
        was cancelled or failed, an open call or open reasoning is dropped, from the ids too.
        """
        if self.stopped is None:
            self._scan(self._ledger.flush())
        if self.stopped is None:
            self._feed(self._stop.flush())
        self.kept, self.tail = self._ledger.cut(self._end, spaces=self.stopped == "tool_calls")
        scanner = self._scanner
        if reason in ("cancelled", "error") and (scanner.in_call or scanner.in_reasoning):
            self.kept, self.tail = self._ledger.cut(scanner.open_start, spaces=False)
            self._emitter.drop_open()
        elif self.stopped != "tool_calls":
            scanner.finish("unfinished" if reason == "stop" else "truncated")
        self._emitter.close()
        return self._emitter.take_events()

    def _scan(self, text: str) -> None:
        released, match = self._stop.push(text)
        self._feed(released)
        if match is not None and self.stopped is None:
            self.stopped, self._end = "stop_sequence", match

    def _feed(self, text: str) -> None:
        self._scanner.push(text)
        if self._emitter.end is not None:
            self.stopped, self._end = "tool_calls", self._emitter.end
