"""What a turn feeds: its input as messages, and the token log that the engine is to have."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from agentserve.engine.plan import RunnerInfo
from agentserve.errors import (
    ContextFull,
    ExceedsKvCapacity,
    InvalidRequest,
    ResultConflict,
    ToolResultsMissing,
    UnknownCallId,
)
from agentserve.sessions.conversation import Conversation, Message
from agentserve.sessions.items import as_items, input_message, result_message
from agentserve.sessions.tree import Anchor, TurnNode, common_prefix
from agentserve.wire import AssistantItem, Item, Recomputed, ToolResultItem

if TYPE_CHECKING:
    from agentserve.sessions.session import Session
    from agentserve.sessions.text import ModelText

_SUPERSEDED = "the conversation went on without it"


class Fed(msgspec.Struct, frozen=True):
    """The input of a turn: results in call order, then what the client said.

    `continues` names the turn whose last message goes on.
    """

    items: tuple[Item, ...] = ()
    messages: tuple[Message, ...] = ()
    continues: str | None = None


@dataclass(frozen=True)
class Prompt:
    """The log before generation and what of it is new; `moved` had KV at other positions."""

    log: array[int]
    new_tokens: int
    moved: tuple[Recomputed, ...]


def resolve_input(session: Session, content: str | list[Item], on_pending: str) -> Fed:
    """Return the input joined with the staged results.

    Raises InvalidRequest, UnknownCallId, ResultConflict, ToolResultsMissing; stores nothing.
    """
    calls = {call.call_id: call for call in session.pending()}
    results = {key: item for key, item in session.staged.items() if key in calls}
    said: list[Item] = []
    for item in as_items(content):
        if isinstance(item, AssistantItem):
            raise InvalidRequest("assistant items belong into the history", param="input")
        if not isinstance(item, ToolResultItem):
            said.append(item)
            continue
        if item.call_id not in calls:
            raise UnknownCallId(f"no call {item.call_id!r} waits for a result", param="input")
        if results.setdefault(item.call_id, item) != item:
            raise ResultConflict(f"another result was given for {item.call_id!r}", param="input")
    missing = [key for key in calls if key not in results]
    if missing and on_pending == "require":
        raise ToolResultsMissing(
            f"{len(missing)} calls wait for their results", param="input", pending_calls=missing
        )
    for key in missing:
        results[key] = ToolResultItem(key, status="cancelled", reason=_SUPERSEDED)
    ordered = [results[key] for key in calls]
    messages = [result_message(results[key], call) for key, call in calls.items()]
    messages += [input_message(item) for item in said]  # type: ignore[arg-type]
    return Fed((*ordered, *said), tuple(messages), None if messages else _continued(session))


def _continued(session: Session) -> str | None:
    head = session.head
    if head is None or not head.continuable:
        return None
    return session.tree.entries(head)[-1].turn


def conversation(
    session: Session, messages: list[Message], more: tuple[Message, ...] = ()
) -> Conversation:
    """Return what the template renders: the system text, the history, and what follows."""
    system = session.profile.system
    lead = () if system is None else (Message(role="system", text=system),)
    return Conversation(
        messages=(*lead, *messages, *more),
        tools=session.profile.tools,
        options=dict(session.profile.template_options),
        now=session.template_now,
    )


def compose(session: Session, text: ModelText, fed: Fed, *, generates: bool) -> Prompt:
    """Return the token log for the head plus `fed`.

    With an anchor only the glue is rendered, at a cost that does not depend on the history.
    """
    head, log = session.head, session.tree.log(session.head)
    anchor = None
    if head is not None and head.tools_version == session.profile.tools_version:
        anchor = head.anchor
        if not fed.messages and (fed.continues or not generates):
            return _continued_prompt(session, text, head)
    whole = conversation(session, session.tree.messages(head), fed.messages)
    if not any(message.role != "system" for message in whole.messages) and (
        generates or not whole.messages
    ):
        raise InvalidRequest("there is nothing to generate from", param="input")
    if anchor is not None:
        glue = _glue(session, text, whole, anchor, generates)
        if glue is not None:
            kept = log if anchor.tokens == len(log) else log[: anchor.tokens]
            return _plain_prompt(head, log, kept + glue, anchor.tokens)
    full = array("i", text.composer.tokens(whole, generates))
    if anchor is None:
        return _plain_prompt(head, log, full)
    return _rewritten_prompt(session, text, fed, full)


def rewritten(session: Session, text: ModelText, fed: Fed) -> Conversation | None:
    """Return the whole conversation with `fed` if the log before it may be rendered anew for it."""
    head = session.head
    whole = conversation(session, session.tree.messages(head), fed.messages)
    anchor = head.anchor if head is not None else None
    if anchor is None or _glue(session, text, whole, anchor, True) is not None:
        return None
    return whole


def _glue(
    session: Session, text: ModelText, whole: Conversation, anchor: Anchor, generates: bool
) -> array[int] | None:
    """Return what follows the anchor, or None when the log before it has to be rendered anew."""
    lead = session.profile.system is not None
    first_new = anchor.messages + lead
    glue = text.composer.extension(whole, first_new, generates)
    if glue is None and session.profile.on_template_rewrite == "keep":
        glue = text.composer.extension(whole, first_new, generates, keep=True)
    return None if glue is None else array("i", glue)


def _continued_prompt(session: Session, text: ModelText, head: TurnNode) -> Prompt:
    """Go on with the same message; the text of a token that was split is encoded now."""
    log = session.tree.log(head)[:]
    messages = session.tree.messages(head)
    if messages and messages[-1].tail:
        last = msgspec.structs.replace(messages[-1], open=True)
        whole = conversation(session, [*messages[:-1], last])
        log.extend(text.composer.extension(whole, len(whole.messages)) or ())
    return Prompt(log, len(log) - _kv(head, len(log)), head.moved)


def _kv(head: TurnNode | None, keep: int) -> int:
    return min(head.kv_length, keep) if head is not None else 0


def _plain_prompt(
    head: TurnNode | None, log: array[int], full: array[int], same: int = 0
) -> Prompt:
    """Return the prompt `full` after `log`, of which the first `same` tokens are known to be it."""
    computed = _kv(head, len(log))
    kv = computed if computed <= same else _kv(head, common_prefix(log, full))
    moved = head.moved if head is not None else ()
    new = max(0, len(full) - kv - sum(part.tokens for part in moved))
    return Prompt(full, new, moved)


def _rewritten_prompt(session: Session, text: ModelText, fed: Fed, full: array[int]) -> Prompt:
    """Count a past that the template changed: what stays after the first difference is moved.

    New is only what depends on the input: where another question would have given other tokens.
    """
    log = session.tree.log(session.head)
    keep = common_prefix(log, full)
    if keep == len(log):
        return _plain_prompt(session.head, log, full)
    computed = len(full) - _kv(session.head, keep)
    past = [Message(role="user", text="."), Message(role="assistant", text=".")]
    first = fed.messages[0].text if fed.messages else ""
    other = Message(role="user", text="1" if first.startswith("Y") else "Yes")
    given, instead = (
        array("i", text.composer.tokens(conversation(session, past, more)))
        for more in (fed.messages, (other,))
    )
    new = min(computed, max(1, len(given) - common_prefix(given, instead)))
    moved = computed - new
    return Prompt(full, new, (Recomputed(moved, "template_rewrite"),) if moved else ())


def require_plausible(
    session: Session, messages: Sequence[Message], text: ModelText, info: RunnerInfo
) -> None:
    """Raise ContextFull for messages that the context could never hold, before they are encoded.

    Encoding takes a second for each megabyte, and every session would wait for it.
    """
    size = len((session.profile.system or "").encode())
    size += sum(
        len(message.text.encode()) + len(message.reasoning.encode()) for message in messages
    )
    least = size // text.tokenizer.longest_token + len(messages)
    limit = info.max_context
    if least > limit:
        raise ContextFull(
            f"{size} bytes of text in {len(messages)} messages are at least {least} tokens; "
            f"the context has {limit}",
            param="input",
            used=session.head.length if session.head is not None else 0,
            input=least,
            limit=limit,
            over=least - limit,
        )


def require_room(session: Session, prompt: Prompt, info: RunnerInfo, reserve: int) -> None:
    """Raise ContextFull or ExceedsKvCapacity when the prompt and one token more do not fit."""
    used = session.head.length if session.head is not None else 0
    total = len(prompt.log)
    limit = info.max_context - reserve
    over = total + 1 - limit
    if over > 0:
        raise ContextFull(
            f"{total} tokens do not fit the context of {limit}: {over} too many",
            param="input",
            used=used,
            input=total - used,
            limit=limit,
            over=over,
        )
    capacity = info.num_blocks * info.block_size
    over = total + 1 - capacity
    if over > 0:
        raise ExceedsKvCapacity(
            f"{total} tokens can never fit this server's KV of {capacity} tokens: {over} too many",
            param="input",
            used=used,
            input=total - used,
            limit=capacity,
            over=over,
        )


def fits(tokens: int, info: RunnerInfo) -> bool:
    """Return whether a prompt of `tokens` and one token more fit the context and the KV."""
    return tokens < min(info.max_context, info.num_blocks * info.block_size)
