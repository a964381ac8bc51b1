"""What a person sees of a running agent."""

from agentserve import wire
from agentserve.cli.terminal import printable, summary


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[31m\x07\x9b\tb\r\n") == "a[31m\tb\n"


def test_the_figures_of_a_turn_name_the_tiers_that_its_cached_tokens_came_from():
    turn = wire.Turn(
        *("t_1", "s", None),
        status="completed",
        usage=wire.Usage(input_tokens=221, cached_tokens=206, new_tokens=221, output_tokens=9),
        kv=wire.KvTokens(device=200, host=6),
        timing_ms=wire.Timing(decode=450),
        context=wire.Context(230, 8192, 7962),
    )
    tiers = "cached 206 (device 200, host 6), computed 15"
    assert summary(turn) == f"[9 tokens, 20.0 tok/s | {tiers} | context 230 of 8192]"
