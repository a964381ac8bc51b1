"""Any history as entries: imports, compaction, edits and pruning all come through here."""

from collections.abc import Callable, Sequence

import msgspec

from agentserve.errors import InvalidRequest, TurnNotFound, UnknownCallId
from agentserve.sessions.conversation import Message
from agentserve.sessions.items import MintCall, assistant_message, input_message, result_message
from agentserve.sessions.tree import Entry, Pending
from agentserve.wire import AssistantItem, HistoryItem, Item, OutputItem, RefItem, ToolResultItem


class Names(msgspec.Struct):
    """Where a history gets its ids: `turn` opens a new turn, the others name what is in it."""

    turn: Callable[[], str]
    call: MintCall
    item: Callable[[], str]
    now_ms: int


class HistoryBuilder:
    """Groups items into turns: what was fed, up to and including an assistant message.

    `path` is the history that refs name; `find` looks up turns on other branches. A kept turn is
    the same entry again, with its ids. Results follow their calls in call order; only the calls at
    the very end may be without one.
    """

    def __init__(
        self, names: Names, path: Sequence[Entry], find: Callable[[str], Entry | None]
    ) -> None:
        self._names = names
        self._path = path
        self._find = find
        self.entries: list[Entry] = []
        self._fed: list[Item] = []
        self._messages: list[Message] = []
        self._calls: dict[str, Pending] = {}
        self._results: dict[str, ToolResultItem] = {}
        self._refs: set[str] = set()

    def add(self, item: HistoryItem) -> None:
        """Append one item. Raises InvalidRequest, TurnNotFound, UnknownCallId."""
        if isinstance(item, RefItem):
            for entry in self._resolve(item.ref):
                self._add_kept(entry)
        elif isinstance(item, ToolResultItem):
            self._add_result(item)
        elif isinstance(item, AssistantItem):
            self._settle_results()
            turn = self._names.turn()
            names = self._names
            message, output, calls = assistant_message(item, names.call, names.item, names.now_ms)
            self._messages.append(message)
            self._close(turn, output, calls)
        else:
            self._settle_results()
            self._fed.append(item)
            self._messages.append(input_message(item))

    def finish(self) -> tuple[tuple[Entry, ...], tuple[Pending, ...], dict[str, ToolResultItem]]:
        """Return the entries, the calls still pending, and results given for some of those."""
        staged: dict[str, ToolResultItem] = {}
        if len(self._results) < len(self._calls):
            staged = self._results
        else:
            self._settle_results()
            self._flush()
        return tuple(self.entries), tuple(self._calls.values()), staged

    def _add_result(self, item: ToolResultItem) -> None:
        if item.call_id not in self._calls:
            raise UnknownCallId(f"no call {item.call_id!r} precedes this result", param="items")
        self._results[item.call_id] = item

    def _settle_results(self) -> None:
        missing = [call for call in self._calls if call not in self._results]
        if missing:
            raise InvalidRequest(f"the call {missing[0]!r} has no result", param="items")
        for call in self._calls.values():
            result = self._results[call.call_id]
            self._fed.append(result)
            self._messages.append(result_message(result, call))
        self._calls, self._results = {}, {}

    def _flush(self) -> None:
        if self._messages:
            self._close(self._names.turn(), (), ())

    def _close(self, turn: str, output: tuple[OutputItem, ...], calls: tuple[Pending, ...]) -> None:
        self.entries.append(Entry(turn, tuple(self._fed), output, tuple(self._messages), calls))
        self._fed, self._messages = [], []
        self._calls = {call.call_id: call for call in calls}

    def _add_kept(self, entry: Entry) -> None:
        if entry.turn in self._refs:
            raise InvalidRequest(f"turn {entry.turn!r} is named twice", param="items")
        self._refs.add(entry.turn)
        answered = {item.call_id for item in entry.fed if isinstance(item, ToolResultItem)}
        self._calls = {key: call for key, call in self._calls.items() if key not in answered}
        self._settle_results()
        self._flush()
        before = self.entries[-1].turn if self.entries else None
        if entry.continues is not None and entry.continues != before:
            entry = msgspec.structs.replace(entry, continues=None)
        self.entries.append(entry)
        self._calls = {call.call_id: call for call in entry.calls}

    def _resolve(self, ref: str) -> Sequence[Entry]:
        first, _, last = ref.partition("..")
        if not last:
            entry = next((e for e in self._path if e.turn == first), None) or self._find(first)
            if entry is None:
                raise TurnNotFound(f"no turn {first!r} in this session", param="items")
            return (entry,)
        turns = [entry.turn for entry in self._path]
        for turn in (first, last):
            if turn not in turns:
                raise TurnNotFound(f"no turn {turn!r} in the current history", param="items")
        start, end = turns.index(first), turns.index(last)
        if start > end:
            raise InvalidRequest(f"the range {ref!r} runs backwards", param="items")
        return self._path[start : end + 1]
