"""Values of command line options."""

import typing

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from agentserve.cli.options import KvPolicyOption, format_size, parse_size
from agentserve.cli.serve import host_memory, served_name
from agentserve.kv.policy import POLICIES


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("512MB", 512 << 20),
        ("512MiB", 512 << 20),
        ("2g", 2 << 30),
        ("1.5G", 3 << 29),
        (" 8 GiB ", 8 << 30),
        ("1T", 1 << 40),
        ("100B", 100),
    ],
)
def test_a_size_is_read_in_powers_of_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "much", "-1G", "1X", "1G2", "1e9", "G", "1..5G", "nan", "∞", "0.4", "9" * 400, "٣M"],
)
def test_what_is_not_a_size_is_refused_with_examples(text):
    with pytest.raises(typer.BadParameter, match="512M, 2GiB"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 52))
def test_a_printed_size_is_within_a_twentieth_of_the_real_one(size):
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.05)


def test_the_served_name_of_a_path_is_its_last_part_and_of_anything_else_itself(tmp_path):
    file = tmp_path / "My-Model.Q4.gguf"
    file.touch()
    assert served_name(str(file)) == "My-Model.Q4"
    assert served_name(f"{tmp_path}/") == tmp_path.name
    assert served_name("owner/model") == "owner/model"
    assert served_name("smollm2-135m") == "smollm2-135m"


def test_the_policies_that_can_be_asked_for_are_those_that_there_are():
    literal, _ = typing.get_args(KvPolicyOption)
    assert typing.get_args(literal) == POLICIES


def test_a_policy_without_a_host_tier_takes_no_host_memory_and_refuses_to_be_given_some():
    assert {policy: host_memory(policy, None) for policy in POLICIES} == {
        "none": 0,
        "device-lru": 0,
        "lru+host": None,
        "tool-aware": None,
    }
    assert [host_memory(policy, 0) for policy in POLICIES] == [0, 0, 0, 0]
    for policy in ("lru+host", "tool-aware"):
        assert host_memory(policy, 5 << 20) == 5 << 20
    for policy in ("none", "device-lru"):
        with pytest.raises(typer.BadParameter, match=f"{policy} has no host tier"):
            host_memory(policy, 5 << 20)
