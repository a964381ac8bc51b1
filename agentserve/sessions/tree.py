"""The turn tree: immutable nodes, a head that moves, and the token log of any node.

The log at a node is its parent's log cut to `keep`, plus the node's own `tokens`. The history at a
node is its parent's entries cut to `keep_entries`, plus its own. Rollback, edits and compaction are
nodes (or moves of the head) with a smaller keep; nothing is ever rewritten in place.
"""

from array import array
from collections.abc import Iterable, Iterator

import msgspec

from agentserve.engine.plan import unpack
from agentserve.sessions.conversation import Message
from agentserve.wire import Item, OutputItem, PendingCall, Recomputed, Turn

MAX_BRANCH_NODES = 256  # nodes kept outside the head's path


class Anchor(msgspec.Struct, frozen=True):
    """The last point where the log ended with a generated message; what follows it is glue."""

    tokens: int
    messages: int


class Pending(msgspec.Struct, frozen=True):
    """A call without a result; `prompt_id` is the id that the template shows."""

    call_id: str
    name: str
    prompt_id: str
    since_ms: int

    def wire(self) -> PendingCall:
        """Return the shape that clients see."""
        return PendingCall(self.call_id, self.name, self.since_ms)


class Entry(msgspec.Struct, frozen=True):
    """One turn in a history: what was fed, what came out, and both as messages.

    `continues` names the turn before it when the first message goes on with that turn's last one.
    """

    turn: str
    fed: tuple[Item, ...]
    output: tuple[OutputItem, ...]
    messages: tuple[Message, ...]
    calls: tuple[Pending, ...] = ()
    continues: str | None = None
    record: bytes = b""  # the turn as clients see it, JSON; none for imported turns


class TurnNode(msgspec.Struct, frozen=True):
    """A state that the session was in. `length` and `count` are totals of tokens and entries."""

    id: str
    parent: str | None
    keep: int
    keep_entries: int
    tokens: bytes
    entries: tuple[Entry, ...]
    pending: tuple[Pending, ...] = ()
    anchor: Anchor | None = None
    kv_length: int = 0  # tokens of the log whose KV was computed when the node was made
    moved: tuple[Recomputed, ...] = ()  # tokens after kv_length that had KV at other positions
    tools_version: int = 0
    continuable: bool = False  # an empty input goes on with the last message
    reasons: bool = False  # that message's reasoning is open

    @property
    def length(self) -> int:
        """Tokens in the log."""
        return self.keep + len(self.tokens) // 4

    @property
    def count(self) -> int:
        """Entries in the history."""
        return self.keep_entries + len(self.entries)

    def with_turn(self, turn: Turn) -> "TurnNode":
        """Return this node with the answer that its own turn gave."""
        entries = tuple(
            msgspec.structs.replace(entry, record=msgspec.json.encode(turn))
            if entry.turn == turn.id
            else entry
            for entry in self.entries
        )
        return msgspec.structs.replace(self, entries=entries)


class TurnTree:
    """The nodes of one session and its head. None is the state before the first turn."""

    def __init__(self) -> None:
        self.nodes: dict[str, TurnNode] = {}
        self.head: TurnNode | None = None
        self._log: tuple[str | None, array[int]] = (None, array("i"))
        self._messages: tuple[str | None, list[Message]] = (None, [])

    def copy(self) -> "TurnTree":
        """Return a tree with the same nodes and head, which then moves on its own."""
        tree = TurnTree()
        tree.nodes = dict(self.nodes)
        tree.head = self.head
        return tree

    def add(self, node: TurnNode, log: "array[int] | None" = None) -> list[str]:
        """Make `node` the head and return the ids of the nodes that were pruned.

        A node of the head's own id takes its place: it differs in its counts or in its log only.
        """
        if self.head is not None and node.id == self.head.id:
            self._log = (node.id, self.log(self.head) if log is None else log)
            self.nodes[node.id] = self.head = node
            return []
        known, messages = self._messages
        parent = self.nodes[node.parent] if node.parent is not None else None
        if known == node.parent and node.keep_entries == (parent.count if parent else 0):
            self._messages = (node.id, extend(messages, node.entries))
        self.nodes[node.id] = node
        self.head = node
        if log is not None:
            self._log = (node.id, log)
        return self._prune()

    def move(self, node: TurnNode | None) -> None:
        """Make a node of this tree the head."""
        self.head = node

    def ancestry(self, node: TurnNode | None) -> Iterator[TurnNode]:
        """Yield `node` and its parents, newest first."""
        while node is not None:
            yield node
            node = self.nodes[node.parent] if node.parent is not None else None

    def log(self, node: TurnNode | None) -> "array[int]":
        """Return the token log at `node` (not to be changed by the caller)."""
        key = node.id if node is not None else None
        if self._log[0] != key or key is None:
            self._log = (key, self._assemble(node))
        return self._log[1]

    def _assemble(self, node: TurnNode | None) -> "array[int]":
        pieces: list[bytes] = []
        end = node.length if node is not None else 0
        for step in self.ancestry(node):
            if end > step.keep:
                pieces.append(step.tokens[: 4 * (end - step.keep)])
                end = step.keep
        return unpack(b"".join(reversed(pieces)))

    def entries(self, node: TurnNode | None) -> list[Entry]:
        """Return the history at `node`, oldest first."""
        pieces: list[tuple[Entry, ...]] = []
        end = node.count if node is not None else 0
        for step in self.ancestry(node):
            if end > step.keep_entries:
                pieces.append(step.entries[: end - step.keep_entries])
                end = step.keep_entries
        return [entry for piece in reversed(pieces) for entry in piece]

    def messages(self, node: TurnNode | None) -> list[Message]:
        """Return the messages of the history at `node` (not to be changed by the caller)."""
        key = node.id if node is not None else None
        if self._messages[0] != key or key is None:
            self._messages = (key, extend([], self.entries(node)))
        return self._messages[1]

    def find_entry(self, turn: str) -> Entry | None:
        """Return the entry of a turn: the head's history first, then any branch."""
        for entry in self.entries(self.head):
            if entry.turn == turn:
                return entry
        for node in self.nodes.values():
            for entry in node.entries:
                if entry.turn == turn:
                    return entry
        return None

    def _prune(self) -> list[str]:
        if len(self.nodes) <= MAX_BRANCH_NODES:
            return []
        path = {node.id for node in self.ancestry(self.head)}
        pruned: list[str] = []
        while len(self.nodes) - len(path) > MAX_BRANCH_NODES:
            parents = {node.parent for node in self.nodes.values()}
            leaf = next(key for key in self.nodes if key not in path and key not in parents)
            del self.nodes[leaf]
            pruned.append(leaf)
        return pruned


def extend(messages: list[Message], entries: Iterable[Entry]) -> list[Message]:
    """Append the messages of `entries` in place; a continued message stays one message."""
    for entry in entries:
        own = entry.messages
        if entry.continues and own and messages:
            messages[-1] = join(messages[-1], own[0])
            own = own[1:]
        messages.extend(own)
    return messages


def join(first: Message, more: Message) -> Message:
    """Return one generated message from its two parts."""
    return msgspec.structs.replace(
        more,
        text=first.text + more.text,
        reasoning=first.reasoning + more.reasoning,
        calls=first.calls + more.calls,
        ids=(first.ids or b"") + (more.ids or b""),
        body_start=first.body_start,
    )


def common_prefix(left: "array[int]", right: "array[int]") -> int:
    """Return how many leading tokens are equal, by bisection over memory compares."""
    low, high = 0, min(len(left), len(right))
    if not high or left[0] != right[0]:
        return 0
    # Arrays and bytes: memoryviews compare item by item, 0.4 ms for 30,000 tokens.
    if (left if len(left) == high else left[:high]) == (
        right if len(right) == high else right[:high]
    ):
        return high
    a, b = left.tobytes(), right.tobytes()
    while low < high:
        middle = (low + high + 1) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(left: "array[int]", right: "array[int]") -> int:
    """Return how many trailing tokens are equal."""
    return common_prefix(left[::-1], right[::-1])
