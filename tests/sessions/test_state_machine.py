"""Random interleavings of everything that a client can do, with an engine that dies now and then.

After every step the log of each session equals the full render of its history, the engine holds
what the server believes it holds, and every token that was sampled is the one that the hash oracle
gives for exactly the log before it: no KV was stale, foreign or misplaced.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from session_rig import TOOLS, Rig, calls, result, rig

from agentserve import wire
from agentserve.engine.oracle import oracle_next
from agentserve.engine.plan import unpack
from agentserve.errors import ContextFull, ExceedsKvCapacity, InvalidRequest, ToolResultsMissing
from agentserve.sessions.handle import TurnHandle
from agentserve.sessions.prompt import conversation

ORACLE = {"num_blocks": 80, "max_context": 768, "stop_one_in": 25}
TEXTS = st.sampled_from(["hi", "what is in the file?", "go on, please", "é ü 漢字", "<|im_end|>"])
FULL = (ContextFull, ExceedsKvCapacity)


@dataclass
class Seen:
    """What the test knows of one session besides the service's own state."""

    id: str


class Sessions(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    @initialize(target=sessions)
    def open(self):
        self.loop = asyncio.new_event_loop()
        self.context = rig(oracle=ORACLE)
        self.rig: Rig = self.wait(self.context.__aenter__())
        self.handles: list[TurnHandle] = []
        self.live: list[Seen] = []
        return self.add(self.wait(self.rig.create(tools=TOOLS, system="Be brief.")))

    def teardown(self):
        if hasattr(self, "loop"):
            self.wait(self.context.__aexit__(None, None, None))
            self.loop.close()

    def wait(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def add(self, session):
        seen = Seen(session)
        self.live.append(seen)
        return seen

    def state(self, seen):
        return self.rig.session(seen.id)

    def turn(self, seen, content, *parts, **body):
        """Start a turn, or return None when there is no room or input for it."""
        start = self.rig.start_forced if parts else self.rig.start
        try:
            handle = self.wait(start(seen.id, content, *parts, **body))
        except FULL:
            return None
        except InvalidRequest:
            assert content == []
            assert self.state(seen).head is None or not self.state(seen).pending()
            return None
        self.handles.append(handle)
        return handle

    def finish(self, handle):
        return self.wait(handle.result()) if handle is not None else None

    def finish_sampled(self, seen, handle):
        """Finish a turn that nobody forced: its tokens are the oracle's for the log before them."""
        turn = self.finish(handle)
        head = self.state(seen).head
        if turn is None or head is None or head.id != turn.id:
            return
        log = self.wait(self.rig.tokens(seen.id))
        generated = [m for m in head.entries[-1].messages if m.ids is not None]
        count = min(turn.usage.output_tokens, *(len(unpack(m.ids)) for m in generated), len(log))
        for place in range(len(log) - count, len(log)) if generated else ():
            assert log[place] == oracle_next(log[:place], 49152, stop_id=2, stop_one_in=25)

    @rule(seen=sessions, text=TEXTS, most=st.integers(0, 12))
    def user_turn(self, seen, text, most):
        handle = self.turn(seen, text, max_output_tokens=most, on_pending="cancel")
        self.finish_sampled(seen, handle)

    @rule(seen=sessions, most=st.integers(1, 6))
    def continue_or_generate(self, seen, most):
        with contextlib.suppress(ToolResultsMissing):
            self.finish_sampled(seen, self.turn(seen, [], max_output_tokens=most))

    @rule(seen=sessions, count=st.integers(1, 3), text=TEXTS)
    def turn_with_calls(self, seen, count, text):
        parts = [("read", {"q": f"{text} {number}"}) for number in range(count)]
        turn = self.finish(self.turn(seen, text, *parts, on_pending="cancel"))
        if turn is not None and turn.status == "completed":
            assert len(calls(turn)) == count
            assert turn.stop_reason == "tool_calls"

    @rule(seen=sessions, data=st.data(), most=st.integers(1, 6))
    def answer_calls_in_any_order(self, seen, data, most):
        pending = [call.call_id for call in self.state(seen).pending()]
        order = data.draw(st.permutations(pending))
        staged = data.draw(st.integers(0, len(order)))
        for call in order[:staged]:
            with contextlib.suppress(Exception):
                self.wait(self.rig.call("tool_results", seen.id, results=[result(call)]))
        known = self.state(seen).staged
        rest = [result(call) for call in order if call not in known]
        if pending:
            self.finish_sampled(seen, self.turn(seen, rest, max_output_tokens=most))

    @rule(
        seen=sessions,
        steps=st.integers(0, 12),
        keep=st.sampled_from(["none", "input", "partial"]),
        calling=st.booleans(),
    )
    def cancel_somewhere(self, seen, steps, keep, calling):
        before = self.wait(self.rig.tokens(seen.id))
        parts = [("write", {"q": "x"}), ("read", {"q": "y"})] if calling else []
        self.rig.link.hold = True
        handle = self.turn(seen, "a turn", *parts, on_pending="cancel")
        if handle is not None:
            self.wait(self.rig.steps(steps))
        self.rig.link.release()
        if handle is None:
            return
        turn = self.wait(self.rig.call("cancel", seen.id, turn=handle.turn_id, keep=keep))
        if turn.status == "cancelled" and keep == "none":
            assert self.wait(self.rig.tokens(seen.id)) == before

    @rule(seen=sessions, steps=st.integers(0, 10), posts=st.booleans())
    def engine_dies(self, seen, steps, posts):
        before = self.wait(self.rig.tokens(seen.id))
        self.rig.link.hold = True
        parts = [("write", {"q": "x"}), ("read", {"q": "y"})]
        handle = self.turn(seen, "a turn", *parts, on_pending="cancel")
        sealed = False
        if handle is not None:
            self.wait(self.rig.steps(steps * 3))
            running = self.state(seen).running
            if running is not None and running.sent_calls() and posts:
                call = running.sent_calls()[0].call_id
                self.wait(self.rig.call("tool_results", seen.id, results=[result(call)]))
                sealed = True
            ended = running is None
        self.rig.link.hold = False
        self.rig.link.crash()
        self.wait(self.rig.settle(20))
        self.rig.link.start()
        self.wait(self.rig.settle(20))
        if handle is None or ended:
            return
        turn = self.finish(handle)
        if sealed:
            assert turn.stop_reason == "failed_after_calls"
        else:
            assert turn.status == "failed"
            assert self.wait(self.rig.tokens(seen.id)) == before

    @rule(seen=sessions, text=TEXTS)
    def two_turns_at_once(self, seen, text):
        self.rig.link.hold = True
        first = self.turn(seen, text, max_output_tokens=3, on_pending="cancel")
        second = self.turn(seen, text, max_output_tokens=3, on_pending="cancel", when_busy="queue")
        self.rig.link.release()
        self.finish(first)
        self.finish_sampled(seen, second)

    @rule(seen=sessions, data=st.data())
    def roll_back(self, seen, data):
        state = self.state(seen)
        turns = [entry.turn for entry in state.tree.entries(state.head)]
        if not turns:
            return
        turn = data.draw(st.sampled_from(turns))
        move = data.draw(st.sampled_from(["to", "before"]))
        kept = turns[: turns.index(turn) + (move == "to")]
        self.wait(self.rig.call("rollback", seen.id, **{move: turn}))
        assert [entry.turn for entry in state.tree.entries(state.head)] == kept

    @rule(seen=sessions, data=st.data())
    def rewrite_history(self, seen, data):
        state = self.state(seen)
        entries = state.tree.entries(state.head)
        first = data.draw(st.integers(0, len(entries)))
        kept = entries[first:]
        ids = [[m.ids for m in entry.messages] for entry in kept]
        items = [{"type": "user", "content": "Summary."}]
        items += [{"ref": entry.turn} for entry in kept]
        self.wait(self.rig.call("history", seen.id, items=items))
        after = state.tree.entries(state.head)[1:]
        assert [entry.turn for entry in after] == [entry.turn for entry in kept]
        assert [[m.ids for m in entry.messages] for entry in after] == ids

    @rule(target=sessions, seen=sessions)
    def fork(self, seen):
        if len(self.live) > 4:
            return multiple()
        (info,) = self.wait(self.rig.call("fork", seen.id)).sessions
        made = self.add(info.id)
        assert self.wait(self.rig.tokens(made.id)) == self.wait(self.rig.tokens(seen.id))
        return made

    @rule(seen=sessions, some=st.integers(1, 3))
    def change_tools(self, seen, some):
        with contextlib.suppress(*FULL):
            self.wait(self.rig.call("patch", seen.id, tools=TOOLS[:some]))

    @rule(target=sessions, seen=consumes(sessions))
    def delete_and_open_another(self, seen):
        self.wait(self.rig.service.delete("local", seen.id, keep_transcript=False))
        self.live.remove(seen)
        return self.add(self.wait(self.rig.create(tools=TOOLS)))

    @invariant()
    def logs_are_the_render_of_their_history(self):
        for seen in getattr(self, "live", []):
            state = self.state(seen)
            messages = list(state.tree.messages(state.head))
            log = self.wait(self.rig.tokens(seen.id))
            if messages and messages[-1].tail:
                continue
            if messages:
                whole = conversation(state, messages)
                assert log == self.rig.text.composer.tokens(whole, False)
            assert self.rig.text.composer.mismatches == 0

    @invariant()
    def the_engine_holds_what_the_server_believes(self):
        for seen in getattr(self, "live", []):
            mirror = self.state(seen).mirror
            mirror.sync(self.rig.service.driver.incarnation)
            if mirror.tokens:
                assert self.rig.link.log(self.state(seen)) == mirror.tokens

    @invariant()
    def every_accepted_turn_ended_exactly_once_and_one_ran_at_a_time(self):
        for seen in getattr(self, "live", []):
            assert self.state(seen).open_runs() == []
        for handle in getattr(self, "handles", []):
            assert handle.done
            events = [event for event, _ in handle._events]
            ends = [e for e in events if isinstance(e, wire.TurnDone | wire.ErrorEvent)]
            assert ends == events[-1:]


Sessions.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyInterleaving = Sessions.TestCase
