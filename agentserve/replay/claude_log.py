"""Reads Claude Code's session logs: a tree of messages, with sub-agents and compactions.

A line has a `uuid` and its parent's. An answer is spread over lines with the same message id, and
the results of parallel calls hang from different ones of them, so that the path from the last
message to the root passes some by.
"""

from collections import Counter
from typing import Any

import msgspec

from agentserve.replay.logged import BadLine, Logged, LoggedCall
from agentserve.replay.openai_log import Line, OpenedSession, as_object, content_text, log_time

SYNTHETIC = "<synthetic>"  # the model of answers that the program made up
ABANDONED = "messages on branches that the user went back from, left out"
SUB_AGENTS = "sessions of sub-agents, played from the start beside the others"
KEPT = "messages kept over a compaction, left out of the history after it"
MADE_UP = "answers that no model gave (errors, interruptions), left out"


class Entry(msgspec.Struct):
    """A line of the log that belongs to the tree."""

    number: int
    uuid: str
    parent: str | None
    sidechain: bool  # of a sub-agent
    raw: dict[str, Any]
    message: dict[str, Any] | None  # None: the line is no message

    @property
    def message_id(self) -> str:
        """The id of the model's answer that the line is a part of."""
        return str((self.message or {}).get("id") or "") if self.role == "assistant" else ""

    @property
    def role(self) -> str:
        """user, assistant, or "" for other lines."""
        return str(self.raw["type"]) if self.message is not None else ""

    @property
    def kept(self) -> set[str]:
        """The messages that stay in the prompt, where the line is a compaction that keeps some."""
        found: Any = self.raw
        for name in ("compactMetadata", "preservedMessages", "uuids"):
            found = found.get(name) if isinstance(found, dict) else None
        return {str(uuid) for uuid in found} if isinstance(found, list) else set()

    def blocks(self, kind: str) -> list[dict[str, Any]]:
        """Return the blocks of the content that are of this kind."""
        content = (self.message or {}).get("content")
        parts = content if isinstance(content, list) else []
        return [part for part in parts if isinstance(part, dict) and part.get("type") == kind]


def has_line(value: Any) -> bool:
    """Return whether a line is a message of Claude Code."""
    return (
        isinstance(value, dict)
        and value.get("type") in ("user", "assistant")
        and isinstance(value.get("message"), dict)
    )


def read_tree(lines: list[Line]) -> tuple[list[OpenedSession], Counter[str]]:
    """Return the conversations of a log, and what was left out.

    Every root of the tree is a conversation of its own: `/clear` and sub-agents begin one. Raises
    BadLine.
    """
    notes: Counter[str] = Counter()
    tree = _Tree()
    for number, value in lines:
        entry = _entry(number, value)
        if entry is not None and entry.uuid not in tree.entries:
            tree.add(entry)
    conversations = list(tree.conversations.values())
    sessions = [_session(part, tree.entries, notes) for part in conversations]
    notes[SUB_AGENTS] += sum(part[0].sidechain for part in conversations)
    notes[KEPT] += len(tree.kept)
    if notes[SUB_AGENTS] == len(sessions):
        del notes[SUB_AGENTS]  # a log of one sub-agent alone
    return sessions, notes


class _Tree:
    """Finds each line's parent and conversation."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.conversations: dict[str, list[Entry]] = {}  # by the uuid of the root
        self.kept: set[str] = set()  # messages that a compaction left in the prompt
        self._roots: dict[str, str] = {}
        self._newest: dict[bool, Entry] = {}  # of the main conversations and of sub-agents

    def add(self, entry: Entry) -> None:
        """Take the next line; its parent becomes the one that it follows here."""
        parent = self._parent(entry)
        entry.parent = parent.uuid if parent is not None else None
        self.entries[entry.uuid] = entry
        self._newest[entry.sidechain] = entry
        root = self._roots[parent.uuid] if parent is not None else entry.uuid
        self._roots[entry.uuid] = root
        self.conversations.setdefault(root, []).append(entry)
        self.kept |= entry.kept

    def _parent(self, entry: Entry) -> Entry | None:
        before = self._newest.get(entry.sidechain)
        if entry.parent is None:
            begins = entry.sidechain or (entry.role == "user" and not entry.blocks("tool_result"))
            return None if begins else before
        if entry.parent in self.kept or entry.parent not in self.entries:
            return before  # the line is missing, or is now behind a compaction
        parent = self.entries[entry.parent]
        return parent if parent.sidechain == entry.sidechain else None


def _entry(number: int, value: Any) -> Entry | None:
    """Return the line as part of the tree; None for lines beside it (summaries, snapshots)."""
    if not isinstance(value, dict) or not isinstance(kind := value.get("type"), str):
        raise BadLine(number, "no object with a type, unlike the lines before")
    is_message = kind in ("user", "assistant")
    if is_message and not has_line(value):
        raise BadLine(number, f"a line of type {kind} has no message")
    if not is_message and not value.get("uuid"):
        return None
    parent = value.get("parentUuid") or value.get("logicalParentUuid")
    return Entry(
        number=number,
        uuid=str(value.get("uuid") or f"line {number}"),
        # A log without a tree is a list.
        parent=str(parent) if parent else (None if value.get("uuid") else "the line before"),
        sidechain=bool(value.get("isSidechain")),
        raw=value,
        message=value["message"] if is_message else None,
    )


def _session(part: list[Entry], entries: dict[str, Entry], notes: Counter[str]) -> OpenedSession:
    kept = _taken(part, entries)
    notes[ABANDONED] += sum(entry.message is not None for entry in part) - sum(
        entry.message is not None for entry in kept
    )
    messages: list[Logged] = []
    answers: dict[str, Logged] = {}
    reset = False
    for entry in kept:
        if entry.raw.get("subtype") == "compact_boundary":
            reset = True
        elif entry.role == "user":
            found = _user(entry)
            if reset and found:
                found[0].reset, reset = True, False
            messages += found
        elif entry.role == "assistant" and _made_up(entry):
            notes[MADE_UP] += 1
        elif entry.role == "assistant":
            message = answers.get(entry.message_id) if entry.message_id else None
            if message is None:
                message = Logged("assistant", reset=reset, at=log_time(entry.raw.get("timestamp")))
                reset = False
                messages.append(message)
                answers[entry.message_id] = message
            _extend(message, entry)
    return OpenedSession(messages)


def _taken(part: list[Entry], entries: dict[str, Entry]) -> list[Entry]:
    """Return what led to the last message: its ancestors, and what belongs to their answers."""
    leaf = next((entry for entry in reversed(part) if entry.message is not None), part[-1])
    path: set[str] = set()
    here: str | None = leaf.uuid
    while here is not None and here not in path:
        path.add(here)
        here = entries[here].parent
    answers = {entry.message_id for entry in part if entry.uuid in path} - {""}
    path |= {entry.uuid for entry in part if entry.message_id in answers}
    calls = {
        str(block.get("id"))
        for entry in part
        if entry.uuid in path
        for block in entry.blocks("tool_use")
    }
    return [
        entry
        for entry in part
        if entry.uuid in path
        or any(str(block.get("tool_use_id")) in calls for block in entry.blocks("tool_result"))
    ]


def _made_up(entry: Entry) -> bool:
    model = (entry.message or {}).get("model")
    return model == SYNTHETIC or bool(entry.raw.get("isApiErrorMessage"))


def _user(entry: Entry) -> list[Logged]:
    """Return the results and then the words of a user's line."""
    results = [
        Logged(
            "tool",
            text=content_text(block.get("content"), entry.number),
            call_id=str(block.get("tool_use_id") or ""),
            at=log_time(entry.raw.get("timestamp")),
        )
        for block in entry.blocks("tool_result")
    ]
    content = (entry.message or {}).get("content")
    if isinstance(content, list):
        content = [part for part in content if part not in entry.blocks("tool_result")]
    if results and not content:
        return results
    return [*results, Logged("user", text=content_text(content, entry.number))]


def _extend(message: Logged, entry: Entry) -> None:
    """Add what a line has of an answer."""
    content = (entry.message or {}).get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadLine(entry.number, "an answer's content is neither text nor a list")
    called = log_time(entry.raw.get("timestamp"))
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use":
            call_id, name = str(part.get("id") or ""), str(part.get("name") or "")
            message.calls.append(LoggedCall(call_id, name, as_object(part.get("input", {}))))
            message.at = called if called is not None else message.at
        elif kind in ("thinking", "redacted_thinking"):
            message.thinking = True
        else:
            text = content_text([part], entry.number)
            message.text = "\n\n".join(piece for piece in (message.text, text) if piece)
