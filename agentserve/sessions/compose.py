"""From a conversation to token ids: the template's text around messages that keep their own ids.

`Composer.tokens` renders everything and is the truth. `Composer.extension` renders only what
follows the log of a conversation that ends with a generated message, against a stand-in for the
history, so that its cost does not grow with the session.
"""

import random as random_module
from typing import Any

import msgspec

from agentserve import wire
from agentserve.engine.plan import pack, unpack
from agentserve.errors import InvalidRequest
from agentserve.sessions.conversation import Call, Conversation, Message
from agentserve.sessions.lower import Lowering, client_strings
from agentserve.sessions.marks import Breaker, choose_marks
from agentserve.sessions.probe import Survival, probe
from agentserve.sessions.splice import Kept, Piece, Seams, joined, splice
from agentserve.sessions.template import ChatTemplate, TemplateRefused
from agentserve.sessions.tokenizer import Place, Tokenizer
from agentserve.sessions.toolformat import ToolFormat

__all__ = ["Call", "Composer", "Conversation", "Message"]

_STAND_IN = Message(role="user", text="x")
_STAND_IN_TOOL = wire.Tool(name="x", parameters={"type": "object", "properties": {}})
_KEPT_LOGS = 256
_CALLED = Message(role="assistant", ids=pack([0]), calls=(Call("call00000", "x", {}),))
_RESULT = Message(role="tool", text="z", name="x", call_id="call00000")
_THOUGHT = Message(role="assistant", ids=pack([0, 0]), body_start=1)


class _Rendered(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    pieces: list[Piece]
    mark: str


class Composer:
    """Composes the prompts of one model.

    `warnings` says which kinds of items its template cannot take. `mismatches` counts extensions
    that differed from the full render (a share `check_rate` of them is compared); after the first
    one this composer renders everything.

    Raises ValueError when the template is not usable.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: ToolFormat,
        *,
        check_rate: float = 0.01,
        random: random_module.Random,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self._check_rate = check_rate
        self._random = random
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special)
        self._breaker = Breaker(tokenizer.controls)
        self._stops = tuple(map(tokenizer.control_text, tokenizer.stop_ids))
        self.survival = self._probed()
        self._lowering = Lowering(format, self.survival, self._breaker)
        self.warnings = self.survival.warnings()
        self.mismatches = 0
        self._local = True
        self._stand_in_logs: dict[tuple[Any, ...], list[Piece]] = {}
        self._probe_locality()

    @property
    def local(self) -> bool:
        """Whether glue is rendered without the history."""
        return self._local

    def tokens(self, conversation: Conversation, generation_prompt: bool = True) -> list[int]:
        """Return the ids of the whole conversation.

        When it ends with a generated message that is open, or without a generation prompt, the
        result is the log as that generation left it, without the template's terminator.
        Raises InvalidRequest when the template refuses the conversation.
        """
        rendered = self._render_log(conversation, generation_prompt)
        return self._encode(rendered.pieces, rendered, "start")

    def extension(
        self,
        conversation: Conversation,
        first_new: int,
        generation_prompt: bool = True,
        *,
        keep: bool = False,
    ) -> list[int] | None:
        """Return the ids that follow the log of messages[:first_new], which ends generated.

        None when the template rewrites what is already in the log, or the glue depends on the
        history: use `tokens`. With `keep` the log stays although the template would rewrite it.
        Raises InvalidRequest when the template refuses the conversation.
        """
        last = conversation.messages[first_new - 1] if first_new else None
        if last is None or last.ids is None or not (self._local or keep):
            return None
        if first_new == len(conversation.messages) and (last.open or not generation_prompt):
            return self._tokenizer.encode_render(
                *self._broken_tail(last.tail), place="continuation"
            )
        if keep:
            rendered = self._render(conversation, generation_prompt)
            return self._glue(rendered, self._position(rendered, first_new - 1), last)
        glue = self._local_glue(conversation, first_new, generation_prompt)
        if glue is not None and self._random.random() < self._check_rate:
            self._verify(conversation, first_new, generation_prompt, glue)
        return glue if self._local else None

    def opens_reasoning(self, options: dict[str, Any], *, after_result: bool = False) -> bool:
        """Whether the generation prompt after a user message already opens the model's reasoning.

        `after_result`: after a tool result instead.
        """
        tags = self._format.reasoning
        if tags is None:
            return False
        messages: tuple[Message, ...] = (_STAND_IN,)
        if after_result:
            messages += (msgspec.structs.replace(_CALLED, ids=None), _RESULT)
        prompt = self._generation_prompt(Conversation(messages, options=options))
        return prompt.rstrip().endswith(tags[0])

    def _probed(self) -> Survival:
        """Return what survives; results only if generated calls before them can be spliced."""
        format = self._format
        found = probe(self._template, native=format.native, reasoning_key=format.reasoning_key)
        if found.needs_calls:
            self._lowering = Lowering(format, found, self._breaker)
            try:
                self._render(Conversation((_STAND_IN, _CALLED, _RESULT), (_STAND_IN_TOOL,)), True)
            except InvalidRequest:
                return msgspec.structs.replace(
                    found, calls=False, results=False, needs_calls=False, names_results=""
                )
        return found

    def _render(self, conversation: Conversation, generation_prompt: bool) -> _Rendered:
        try:
            texts = client_strings(conversation)
            mark, quote = choose_marks(texts, 2)
            text = self._template.render(
                self._lowering.messages(conversation, mark, quote),
                tools=self._lowering.tools(conversation.tools, mark),
                generation_prompt=generation_prompt,
                options=self._breaker.value(conversation.options, mark),
                now=conversation.now,
            )
        except TemplateRefused as error:
            raise InvalidRequest(str(error)) from None
        except RecursionError:
            raise InvalidRequest("the conversation is nested too deeply") from None
        # A template that prints Python values escapes the mark.
        for sign in (mark, quote):
            text = text.replace(f"\\u{ord(sign):04x}", sign)
        try:
            pieces = splice(text, quote, self._seams(conversation))
        except ValueError as error:
            raise InvalidRequest(f"the model's chat template: {error}") from None
        return _Rendered(conversation.messages, pieces, mark)

    def _seams(self, conversation: Conversation) -> Seams:
        """Return what tells generated messages from the template's text around them."""
        generated = [(i, m) for i, m in enumerate(conversation.messages) if m.ids is not None]
        answered = [
            i
            for i, message in generated
            if self._lowering.needs_calls
            and (message.calls or _role_at(conversation.messages, i + 1) == "tool")
        ]
        headed = self._format.headed
        thinks = any(message.body_start for _, message in generated)
        first = Conversation((_STAND_IN,), options=conversation.options, now=conversation.now)
        form = self._format.form
        return Seams(
            prompt=self._generation_prompt(first) if thinks or headed or answered else "",
            headed=headed,
            called=frozenset(answered),
            openers=(*form.noise[:1], *form.markers[:1]),
            stops=self._stops,
        )

    def _render_log(self, conversation: Conversation, generation_prompt: bool) -> _Rendered:
        messages = conversation.messages
        last = messages[-1] if messages else None
        if last is None or last.ids is None or (generation_prompt and not last.open):
            return self._render(conversation, generation_prompt)
        before = self._render(_with_messages(conversation, messages[:-1]), True)
        kept = Kept(len(messages) - 1, whole=True)
        return _Rendered(messages, joined([*before.pieces, kept]), before.mark)

    def _generation_prompt(self, conversation: Conversation) -> str:
        """Return the text that the template puts before an answer; "" when it cannot be told."""
        messages = self._lowering.messages(conversation, "", "")
        options, now = conversation.options, conversation.now
        try:
            plain = self._template.render(messages, options=options, now=now)
            asked = self._template.render(
                messages, options=options, now=now, generation_prompt=True
            )
        except TemplateRefused:
            return ""
        return asked[len(plain) :] if asked.startswith(plain) else ""

    def _encode(self, pieces: list[Piece], rendered: _Rendered, place: Place) -> list[int]:
        ids: list[int] = []
        tail = ""
        for piece in pieces:
            if isinstance(piece, str):
                ids += self._tokenizer.encode_render(tail + piece, rendered.mark, place)
                tail = ""
            else:
                message = rendered.messages[piece.index]
                start = 0 if piece.whole else message.body_start
                ids += self._tokenizer.encode_render(tail, rendered.mark, place)
                ids += unpack(message.ids or b"")[start:]
                tail = self._breaker.text(message.tail, rendered.mark)
            place = "continuation"
        return ids + self._tokenizer.encode_render(tail, rendered.mark, place)

    def _glue(self, rendered: _Rendered, at: int, last: Message) -> list[int]:
        """Return the ids of the pieces from `at`, after the tail of the message before them."""
        tail = self._breaker.text(last.tail, rendered.mark)
        pieces = joined([tail, *rendered.pieces[at:]])
        return self._encode(pieces, rendered, "continuation")

    def _broken_tail(self, tail: str) -> tuple[str, str]:
        (mark,) = choose_marks([tail], 1)
        return self._breaker.text(tail, mark), mark

    def _position(self, rendered: _Rendered, index: int) -> int:
        """Return where the pieces after message `index` begin, its tail still to come."""
        for at, piece in enumerate(rendered.pieces):
            if isinstance(piece, Kept) and piece.index == index:
                return at + 1
        raise InvalidRequest("the model's chat template drops a generated message")

    def _local_glue(
        self, conversation: Conversation, first_new: int, generation_prompt: bool
    ) -> list[int] | None:
        """Render the new messages after a stand-in history with the same features."""
        messages = conversation.messages
        history = _stand_in(messages[: first_new - 1], bool(conversation.tools), self._format)
        tools = (_STAND_IN_TOOL,) if conversation.tools and self._format.native else ()
        small = msgspec.structs.replace(
            conversation, tools=tools, messages=(*history, *messages[first_new - 1 :])
        )
        log = _with_messages(small, small.messages[: len(history) + 1])
        try:
            after = self._render(small, generation_prompt)
            before = self._stand_in_log(log)
        except InvalidRequest:
            return None
        size = len(before)
        if before != _plain(after, after.pieces[:size]):
            return None
        return self._glue(after, size, messages[first_new - 1])

    def _stand_in_log(self, log: Conversation) -> list[Piece]:
        """Return the plain pieces of a log whose history is a stand-in: there are few of them."""
        key = (log.messages[:-1], bool(log.tools), wire.encode(log.options), log.now)
        if key not in self._stand_in_logs:
            rendered = self._render_log(log, False)
            if len(self._stand_in_logs) >= _KEPT_LOGS:
                self._stand_in_logs.clear()
            self._stand_in_logs[key] = _plain(rendered, rendered.pieces)
        return self._stand_in_logs[key]

    def _verify(
        self,
        conversation: Conversation,
        first_new: int,
        generation_prompt: bool,
        glue: list[int],
    ) -> None:
        log = _with_messages(conversation, conversation.messages[:first_new])
        bare = self._without_last_tail(log)
        if self.tokens(bare, False) + glue != self.tokens(conversation, generation_prompt):
            self.mismatches += 1
            self._local = False

    def _without_last_tail(self, log: Conversation) -> Conversation:
        last = msgspec.structs.replace(log.messages[-1], tail="")
        return _with_messages(log, (*log.messages[:-1], last))

    def _probe_locality(self) -> None:
        """Compare glue with the full render on small conversations of each shape."""
        answer = Message(role="assistant", ids=pack(self._tokenizer.encode_text("y")))
        called = msgspec.structs.replace(answer, calls=_CALLED.calls)
        user, result = _STAND_IN, _RESULT
        system = Message(role="system", text="w")
        for lead in ((), (system,)):
            for tools in ((), (_STAND_IN_TOOL,)):
                for history in ((user, answer), (user, called, result, answer, user, called)):
                    for new in ((user,), (result,), (result, result), (result, user)):
                        whole = Conversation((*lead, *history, *new), tools)
                        self._probe_one(whole, len(lead) + len(history))

    def _probe_one(self, conversation: Conversation, first_new: int) -> None:
        try:
            glue = self._local_glue(conversation, first_new, True)
            if glue is not None:
                self._verify(conversation, first_new, True, glue)
        except InvalidRequest:
            return  # a shape that this template refuses needs no glue


def _role_at(messages: tuple[Message, ...], index: int) -> str:
    return messages[index].role if index < len(messages) else ""


def _with_messages(conversation: Conversation, messages: tuple[Message, ...]) -> Conversation:
    return msgspec.structs.replace(conversation, messages=messages)


def _stand_in(
    history: tuple[Message, ...], has_tools: bool, format: ToolFormat
) -> tuple[Message, ...]:
    """Return a short history that a template cannot tell from `history`, as far as it matters.

    It has a system message where the other has one, one user message, and an answer with reasoning
    where the loop since the last user message has one (templates drop it at the next).
    """
    leads = bool(history) and history[0].role == "system"
    system = leads or (has_tools and not format.native)
    thought = False
    for message in reversed(history):
        if thought or message.role == "user":
            break
        thought = bool(message.body_start or message.reasoning)
    lead = (Message(role="system", text="x"),) if system else ()
    loop = (_THOUGHT, Message(role="tool", text="x", name="x")) if thought else ()
    return (*lead, _STAND_IN, *loop)


def _plain(rendered: _Rendered, pieces: list[Piece]) -> list[Piece]:
    """Return pieces that can be compared across renders: without marks, a whole body as such."""
    plain: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str):
            plain.append(piece.replace(rendered.mark, ""))
        else:
            whole = piece.whole or not rendered.messages[piece.index].body_start
            plain.append(Kept(piece.index, whole))
    return plain
