import pytest
from msgspec import ValidationError

from agentserve.engine.oracle import OracleRunner, build_oracle, oracle_next
from agentserve.engine.plan import (
    SAMPLED,
    Copy,
    Row,
    SamplingParams,
    SlotAdd,
    SlotDrop,
    StepPlan,
    TableAppend,
    pack,
)


def plan(**parts) -> StepPlan:
    empty = {"step": 1, "dropped": [], "added": [], "appended": [], "copies": [], "rows": []}
    return StepPlan(**{**empty, "tokens": b"", **parts})


def run(runner, masks=None, **parts):
    handle = runner.launch(plan(**parts))
    runner.sample(handle, masks or {})
    return runner.collect(handle)


def add(slot=0, generation=1):
    return SlotAdd(slot, generation, SamplingParams(), 0)


def started(tokens, blocks):
    """A runner whose slot 0 has computed `tokens` in `blocks`, and the token it gave."""
    runner = OracleRunner(block_size=2, num_blocks=8)
    result = run(
        runner,
        added=[add()],
        appended=[TableAppend(0, 0, blocks)],
        rows=[Row(0, 0, len(tokens), True)],
        tokens=pack(tokens),
    )
    return runner, result.tokens[0][0]


def test_the_runner_gives_what_the_reference_gives():
    _, token = started([1, 2, 3], [5, 1])
    assert token == oracle_next([1, 2, 3])


def test_every_token_and_its_position_matter():
    results = {
        oracle_next(t, 1 << 30) for t in ([1, 2, 3], [2, 1, 3], [1, 2], [1, 2, 4], [9, 2, 3])
    }
    assert len(results) == 5


def test_a_block_overwritten_by_another_sequence_changes_the_next_token():
    runner, token = started([1, 2, 3], [5, 1])
    run(
        runner,
        added=[add(slot=1, generation=2)],
        appended=[TableAppend(1, 0, [5])],
        rows=[Row(1, 0, 1, False)],
        tokens=pack([9]),
    )
    result = run(runner, rows=[Row(0, 3, 1, True)], tokens=pack([token]))
    assert result.tokens[0][0] != oracle_next([1, 2, 3, token])
    assert "position 0 (block 5)" in runner.explain(0, [1, 2, 3, token])
    assert "generation 2" in runner.explain(0, [1, 2, 3, token])


def test_a_block_that_was_never_written_changes_the_next_token():
    runner, _ = started([1, 2], [5])
    result = run(
        runner,
        appended=[TableAppend(0, 0, [3])],
        rows=[Row(0, 3, 1, True)],
        tokens=pack([4]),
    )
    assert result.tokens[0][0] != oracle_next([1, 2, 3, 4])
    assert "position 2 (block 3)" in runner.explain(0, [1, 2, 3, 4])


def test_a_copy_brings_its_first_tokens_and_no_more():
    runner, _ = started([1, 2, 3, 4], [5, 1])
    result = run(
        runner,
        added=[add(slot=1)],
        appended=[TableAppend(1, 0, [5, 2])],
        copies=[Copy(7, 0, 1, 2, 1)],
        rows=[Row(1, 3, 1, True)],
        tokens=pack([9]),
    )
    assert result.tickets == [7]
    assert result.tokens[0][0] == oracle_next([1, 2, 3, 9])
    assert runner.explain(1, [1, 2, 3, 9]) == "every cell is right"


def test_a_mask_moves_to_the_next_allowed_token():
    _, free = started([1, 2, 3], [5, 1])
    runner = OracleRunner(block_size=2, num_blocks=8)
    words = [0] * 8
    allowed = (free - 1) % 256
    words[allowed // 32] = 1 << (allowed % 32)
    result = run(
        runner,
        masks={0: b"".join(w.to_bytes(4, "little") for w in words)},
        added=[add()],
        appended=[TableAppend(0, 0, [0, 1])],
        rows=[Row(0, 0, 3, True)],
        tokens=pack([1, 2, 3]),
    )
    assert result.tokens[0] == [allowed]


def test_stop_tokens_come_at_the_rate_that_was_asked_for():
    tokens = [oracle_next([n], 256, stop_id=7, stop_one_in=10) for n in range(2000)]
    assert 150 < tokens.count(7) < 260
    assert oracle_next([5], 256, stop_id=7, stop_one_in=1) == 7


def test_a_slot_is_dropped_only_under_its_generation_and_added_only_once():
    runner, _ = started([1, 2], [0])
    with pytest.raises(ValueError, match="stale"):
        run(runner, dropped=[SlotDrop(0, 9)])
    with pytest.raises(ValueError, match="twice"):
        run(runner, added=[add()])


def test_what_the_step_before_sampled_can_be_an_input_that_the_host_does_not_know():
    runner = OracleRunner(block_size=2, num_blocks=8, depth=1)
    first = runner.launch(
        plan(
            added=[add()],
            appended=[TableAppend(0, 0, [5, 1])],
            rows=[Row(0, 0, 2, True)],
            tokens=pack([1, 2]),
        )
    )
    runner.sample(first, {})
    second = runner.launch(plan(step=2, rows=[Row(0, 2, 1, True)], tokens=pack([SAMPLED])))
    (token,) = runner.collect(first).tokens[0]
    runner.sample(second, {})
    assert runner.collect(second).tokens == [[oracle_next([1, 2, token])]]


@pytest.mark.parametrize(("depth", "step"), [(0, 2), (1, 1), (1, 3)])
def test_an_input_that_no_row_in_flight_gives_is_found_out(depth, step):
    runner = OracleRunner(block_size=2, num_blocks=8, depth=depth)
    opened = {"added": [add()], "appended": [TableAppend(0, 0, [5, 1])]}
    run(runner, **opened, rows=[Row(0, 0, 2, True)], tokens=pack([1, 2]))
    with pytest.raises(ValueError, match="no token was sampled"):
        run(runner, step=step, rows=[Row(0, 2, 1, True)], tokens=pack([SAMPLED]))


def test_the_factory_takes_the_documented_options_only():
    runner, grammars = build_oracle({"num_blocks": 9, "stop_id": 2, "stop_one_in": 5})
    assert runner.info.num_blocks == 9
    assert grammars is None
    with pytest.raises(ValidationError):
        build_oracle({"blocks": 9})
