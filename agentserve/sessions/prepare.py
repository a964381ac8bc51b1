"""Everything about a turn that can be refused: checked and composed before the turn is accepted."""

import functools
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from agentserve.config import ServerSettings
from agentserve.engine.plan import RunnerInfo, pack, unpack
from agentserve.errors import BadToolSchema, InvalidRequest
from agentserve.sessions import compilable, sampling
from agentserve.sessions.constraints import Constraint, Constraints
from agentserve.sessions.conversation import Message
from agentserve.sessions.ids import CallIds, prompt_call_id
from agentserve.sessions.mirror import SubmitOptions
from agentserve.sessions.output import OutputStream
from agentserve.sessions.prompt import (
    Prompt,
    compose,
    require_plausible,
    require_room,
    resolve_input,
)
from agentserve.sessions.schemas import check_schema
from agentserve.sessions.script import Script
from agentserve.sessions.session import Session
from agentserve.sessions.text import ModelText
from agentserve.sessions.turn import TurnRun
from agentserve.wire import NamedTool, Tool, TurnRequest

ANSWER_FREE = (
    "response_format is not enforced beside tools: its objects may begin as this model's calls do"
)


class TurnPreparer:
    """Validates requests against a session and composes what the engine is to run."""

    def __init__(
        self,
        text: ModelText,
        settings: ServerSettings,
        source: random.Random,
        info: Callable[[], RunnerInfo],
        script: Script | None = None,
    ) -> None:
        self.text = text
        self.call_ids = CallIds(source.randbytes(32))
        self._settings = settings
        self._random = source
        self._info = info
        self._script = script
        self._constraints = Constraints(text.format)

    def prepare(self, run: TurnRun) -> None:
        """Fill in the run's prompt and options; the session is not changed.

        Raises the errors of API.md rules 4, 5, 13 and 15 and of bad parameters.
        """
        session, request, info = run.session, run.request, self._info()
        session.require_head(request.expect_head)
        tools = allowed_tools(session, request)
        merged = sampling.merge(session.profile.sampling, request.sampling)
        params = sampling.sampling_params(merged, info.vocab_size, self._random)
        force = self._forced(request)
        run.previous = session.head_id
        if run.previous is None:
            run.warnings = list(self.text.composer.warnings)
        answer = answer_schema(request)
        run.warnings += _unenforced(session, answer)
        run.fed = resolve_input(session, request.input, request.on_pending)
        require_plausible(session, run.fed.messages, self.text, info)
        before, message = _placed(run)
        opened = self._opened(run, before)
        in_reasoning = opened if message is None else _reasons(session)
        generates = not run.prefills_only
        run.prompt = compose(session, self.text, run.fed, generates=generates)
        require_room(session, run.prompt, info, self._settings.reserve_output)
        if self._script is not None and generates and not force:
            force = self._scripted(self._script, run, in_reasoning)
        # A call that was cut is no call, whatever follows: one that is required begins anew.
        fresh = message is None or request.tool_choice not in ("auto", "none")
        constraint = self._constraint(request, tools, in_reasoning if fresh else opened, answer)
        if constraint.answer_free:
            run.warnings.append(ANSWER_FREE)
        run.options = SubmitOptions(
            max_tokens=self._output_limit(run, info),
            stop_ids=list(self.text.tokenizer.stop_ids),
            sampling=params,
            grammar=constraint.spec,
            said=0 if fresh or message is None else _length(session, run.prompt, message),
            anew=in_reasoning == opened,
            force=force,
        )
        stop = sampling.stop_strings(merged)
        run.make_output = functools.partial(
            self._output, run, tools, stop, constraint, in_reasoning=in_reasoning
        )

    def _output(
        self,
        run: TurnRun,
        tools: list[Tool],
        stop: Sequence[str],
        constraint: Constraint,
        *,
        in_reasoning: bool,
    ) -> OutputStream:
        return OutputStream(
            self.text.tokenizer,
            self.text.format,
            {tool.name: tool for tool in tools},
            stop=stop,
            mint_call=self._minter(run),
            mint_item=run.session.mint_item,
            parallel=run.request.parallel_tool_calls,
            tools_on=bool(tools),
            in_reasoning=in_reasoning,
            triggers=constraint.triggers,
            openings=constraint.openings,
        )

    def _output_limit(self, run: TurnRun, info: RunnerInfo) -> int:
        """Return how many tokens the turn may generate.

        The default leaves the reserve of the context free; a limit of the client's may use it.
        """
        if run.request.max_output_tokens is not None:
            return run.request.max_output_tokens
        left = info.max_context - self._settings.reserve_output - len(run.prompt.log)
        run.fills_context = left <= self._settings.default_max_output_tokens
        return min(left, self._settings.default_max_output_tokens)

    def _opened(self, run: TurnRun, before: Sequence[Message]) -> bool:
        """Whether the prompt of a message that follows `before` opens its reasoning."""
        return self.text.composer.opens_reasoning(
            run.session.profile.template_options,
            after_result=bool(before) and before[-1].role == "tool",
        )

    def _minter(self, run: TurnRun) -> Callable[[], str]:
        number = int(run.id[2:])

        def mint() -> str:
            index = len(run.prompt_ids)
            call = self.call_ids.mint(run.session.tag, number, index)
            run.prompt_ids[call] = prompt_call_id(number, index)
            return call

        return mint

    def _forced(self, request: TurnRequest) -> bytes:
        if request.debug is None:
            return b""
        if not self._settings.allow_force:
            raise InvalidRequest("debug.force needs `serve --allow-force`", param="debug")
        tokenizer = self.text.tokenizer
        ids = tokenizer.encode_text(self.text.format.emit(list(request.debug.force)))
        return pack(array("i", [*ids, tokenizer.stop_ids[0]]))

    def _scripted(self, script: Script, run: TurnRun, in_reasoning: bool) -> bytes:
        session = run.session
        fed = run.fed.messages or session.tree.messages(session.head)[-1:]
        text = "\n".join(message.text for message in fed)
        return script.next(session.profile.system or "", text, in_reasoning=in_reasoning)

    def _constraint(
        self,
        request: TurnRequest,
        tools: list[Tool],
        opened: bool,
        answer: dict[str, Any] | None,
    ) -> Constraint:
        if self._script is not None:  # what it says is what the model says, right or wrong
            return Constraint()
        return self._constraints.of(
            tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls,
            in_reasoning=opened,
            answer=answer,
        )


def _placed(run: TurnRun) -> tuple[Sequence[Message], Message | None]:
    """Return the messages that the turn's message follows, and what there is of it already."""
    head = run.session.head
    if run.fed.continues is None or head is None:
        return run.fed.messages or run.session.tree.messages(head), None
    *before, message = run.session.tree.messages(head)
    return before, message


def _reasons(session: Session) -> bool:
    return session.head is not None and session.head.reasons


def _length(session: Session, prompt: Prompt, message: Message) -> int:
    """Return how many tokens at the prompt's end are those of a message that goes on."""
    assert session.head is not None
    return len(unpack(message.ids or b"")) + len(prompt.log) - session.head.length


def _unenforced(session: Session, answer: dict[str, Any] | None) -> list[str]:
    """Return what schemas ask in vain of the grammar: of tools once, of an answer each time."""
    told = []
    if answer is not None:
        told += compilable.warnings("response_format.schema", answer)
    head, profile = session.head, session.profile
    if head is None or head.tools_version != profile.tools_version:
        for tool in profile.tools:
            told += compilable.warnings(f"tools.{tool.name}.parameters", tool.parameters)
    return told


def allowed_tools(session: Session, request: TurnRequest) -> list[Tool]:
    """Return the tools that this turn may call. Raises InvalidRequest for unknown names."""
    by_name = {tool.name: tool for tool in session.profile.tools}
    names = session.profile.tools_allowed
    if request.tools_allowed is not None:
        require_known(by_name, request.tools_allowed, "tools_allowed")
        names = tuple(name for name in request.tools_allowed if names is None or name in names)
    allowed = [tool for name, tool in by_name.items() if names is None or name in names]
    choice = request.tool_choice
    if wants_json(request) and choice not in ("auto", "none"):
        raise InvalidRequest(
            "an answer of a response_format is not a call: leave out one of the two",
            param="tool_choice",
        )
    if isinstance(choice, NamedTool):
        require_known({tool.name for tool in allowed}, [choice.name], "tool_choice")
        return [by_name[choice.name]]
    if choice == "required" and not allowed:
        raise InvalidRequest("tool_choice needs a tool that may be called", param="tool_choice")
    return [] if choice == "none" else allowed


def wants_json(request: TurnRequest) -> bool:
    """Whether the answer has a schema."""
    return request.response_format is not None and request.response_format.type == "json_schema"


def answer_schema(request: TurnRequest) -> dict[str, Any] | None:
    """Return the schema of a constrained answer; None without one. Raises InvalidRequest."""
    answer = request.response_format
    if answer is None or answer.type != "json_schema":
        return None
    if answer.schema is None:
        raise InvalidRequest("json_schema needs a schema", param="response_format.schema")
    try:
        check_schema(answer.schema, "response_format.schema")
    except BadToolSchema as error:
        raise InvalidRequest(error.message, param="response_format.schema") from None
    return answer.schema


def require_known(known: "set[str] | dict[str, Tool]", names: list[str], param: str) -> None:
    """Raise InvalidRequest when a tool name is not one of `known`."""
    for name in names:
        if name not in known:
            raise InvalidRequest(f"no tool {name!r} may be called here", param=param)
