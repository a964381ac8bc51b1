"""Moves of the head that generate nothing: history, rollback, changed tools, forks."""

from array import array
from collections.abc import Sequence

import msgspec

from agentserve.engine.plan import pack
from agentserve.errors import InvalidRequest, TurnNotFound
from agentserve.sessions.conversation import Message
from agentserve.sessions.history import HistoryBuilder, Names
from agentserve.sessions.ids import prompt_call_id
from agentserve.sessions.prepare import TurnPreparer
from agentserve.sessions.prompt import conversation
from agentserve.sessions.session import Session
from agentserve.sessions.text import ModelText
from agentserve.sessions.tree import (
    Anchor,
    Entry,
    Pending,
    TurnNode,
    common_prefix,
    common_suffix,
    extend,
)
from agentserve.wire import HeadAnswer, HistoryItem, Recomputed, RollbackRequest, ToolResultItem


def import_history(
    session: Session, preparer: TurnPreparer, items: Sequence[HistoryItem], now_ms: int
) -> tuple[tuple[Entry, ...], tuple[Pending, ...], dict[str, ToolResultItem]]:
    """Return a history's entries, the calls pending at its end, and results given for those.

    Raises InvalidRequest, TurnNotFound, UnknownCallId.
    """
    calls = 0

    def mint_call(own: str | None) -> tuple[str, str]:
        nonlocal calls
        number = session.next_turn - 1
        prompt_id = prompt_call_id(number, calls)
        wire_id = own or preparer.call_ids.mint(session.tag, number, calls)
        calls += 1
        return wire_id, prompt_id

    names = Names(session.mint_turn, mint_call, session.mint_item, now_ms)
    path = session.tree.entries(session.head)
    builder = HistoryBuilder(names, path, session.tree.find_entry)
    for item in items:
        builder.add(item)
    return builder.finish()


class Edit(msgspec.Struct, frozen=True):
    """A head that was worked out but not yet taken."""

    node: TurnNode | None
    log: "array[int]"
    answer: HeadAnswer


def edit_history(
    session: Session,
    text: ModelText,
    entries: tuple[Entry, ...],
    pending: tuple[Pending, ...],
    *,
    head_id: str,
    reason: str = "history_edited",
) -> Edit:
    """Return the node `head_id` whose history is `entries`: KV stays up to the first difference."""
    head, tree = session.head, session.tree
    old_entries, old_log = tree.entries(head), tree.log(head)
    same = _common_entries(old_entries, entries)
    log, anchor = _render(session, text, extend([], entries))
    keep = common_prefix(old_log, log)
    kv = min(head.kv_length if head is not None else 0, keep)
    moved = min(common_suffix(old_log[keep:], log[keep:]), max(0, _kv(head) - keep))
    recomputed = [Recomputed(moved, reason)] if moved else []
    node = TurnNode(
        id=head_id,
        parent=session.head_id,
        keep=keep,
        keep_entries=same,
        tokens=pack(log[keep:]),
        entries=entries[same:],
        pending=pending,
        anchor=anchor,
        kv_length=kv,
        moved=tuple(recomputed),
        tools_version=session.profile.tools_version,
    )
    answer = HeadAnswer(head_id, keep, len(log) - kv - moved, recomputed)
    return Edit(node, log, answer)


def _render(
    session: Session, text: ModelText, messages: list[Message]
) -> tuple["array[int]", Anchor | None]:
    """Return the log of `messages`; after a last generated one it is as that generation left it."""
    generated = bool(messages) and messages[-1].ids is not None
    if generated:  # the text of a split token comes with the next glue
        messages[-1] = msgspec.structs.replace(messages[-1], tail="")
    whole = conversation(session, messages)
    log = array("i", text.composer.tokens(whole, False) if whole.messages else ())
    return log, Anchor(len(log), len(messages)) if generated else None


def edit_rollback(session: Session, text: ModelText, request: RollbackRequest) -> Edit:
    """Return the head that a rollback asks for.

    Inside an imported or rewritten stretch there is no node yet: a new one is made.
    Raises InvalidRequest, TurnNotFound.
    """
    if (request.to is None) == (request.before is None):
        raise InvalidRequest("give exactly one of `to` and `before`")
    tree, head = session.tree, session.head
    turn = request.to or request.before or ""
    path = tree.entries(head)
    index = next((i for i, entry in enumerate(path) if entry.turn == turn), None)
    if index is None:
        node = tree.nodes.get(turn)
        if node is None:
            raise TurnNotFound(f"no turn {turn!r} in this session", param="to")
        if request.before is not None:
            node = tree.nodes[node.parent] if node.parent is not None else None
        return _move(session, text, node)
    count = index + (request.to is not None)
    if count == 0:
        return _move(session, text, None)
    node = _node_with(session, count)
    if node is not None:
        return _move(session, text, node)
    entries = tuple(path[:count])
    return edit_history(session, text, entries, entries[-1].calls, head_id=session.mint_turn())


def _node_with(session: Session, count: int) -> TurnNode | None:
    """Return the node on the head's path whose history is exactly its first `count` entries."""
    shared = count
    for node in session.tree.ancestry(session.head):
        if node.count == count and shared >= count:
            return node
        shared = node.keep_entries
        if shared < count:
            return None
    return None


def _move(session: Session, text: ModelText, node: TurnNode | None) -> Edit:
    if node is not None and node.tools_version != session.profile.tools_version:
        entries = tuple(session.tree.entries(node))
        return edit_history(
            session,
            text,
            entries,
            node.pending,
            head_id=session.mint_turn(),
            reason="tools_changed",
        )
    old, log = session.tree.log(session.head), session.tree.log(node)
    keep = common_prefix(old, log)
    moved = max(0, _kv(node) - keep)
    parts = [Recomputed(moved, "history_edited")] if moved else []
    answer = HeadAnswer(
        node.id if node is not None else None, keep, max(0, len(log) - keep - moved), parts
    )
    return Edit(node, log, answer)


def edit_tools(session: Session, text: ModelText) -> Edit:
    """Return the same head rendered with the session's changed tools."""
    head = session.head
    assert head is not None
    edit = edit_history(
        session,
        text,
        tuple(session.tree.entries(head)),
        head.pending,
        head_id=head.id,
        reason="tools_changed",
    )
    assert edit.node is not None
    own = msgspec.structs.replace(
        head,
        keep=0,
        tokens=pack(edit.log),
        anchor=edit.node.anchor,
        kv_length=edit.node.kv_length,
        moved=edit.node.moved,
        tools_version=edit.node.tools_version,
        continuable=False,
    )
    return Edit(own, edit.log, edit.answer)


def _kv(node: TurnNode | None) -> int:
    return node.kv_length if node is not None else 0


def _common_entries(old: Sequence[Entry], new: Sequence[Entry]) -> int:
    count = 0
    for left, right in zip(old, new, strict=False):
        if left is not right:
            break
        count += 1
    return count
