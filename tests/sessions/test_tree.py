from array import array

from hypothesis import given
from hypothesis import strategies as st

from agentserve.engine.plan import pack
from agentserve.sessions.conversation import Message
from agentserve.sessions.tree import (
    MAX_BRANCH_NODES,
    Entry,
    TurnNode,
    TurnTree,
    common_prefix,
    common_suffix,
    extend,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def entry(turn, text="x", continues=None):
    message = Message(role="assistant", text=text, ids=pack([ord(c) for c in text]))
    return Entry(turn, (), (), (message,), continues=continues)


def node(turn, parent, keep, tokens, keep_entries=0):
    return TurnNode(turn, parent, keep, keep_entries, pack(tokens), (entry(turn),))


@given(TOKENS, TOKENS)
def test_common_prefix_and_suffix_equal_a_plain_loop(left, right):
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    assert common_prefix(array("i", left), array("i", right)) == same
    assert common_suffix(array("i", left[::-1]), array("i", right[::-1])) == same


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), TOKENS), max_size=30))
def test_the_log_of_every_node_is_its_parent_s_cut_plus_its_own(script):
    tree, logs, nodes = TurnTree(), [[]], [None]
    for number, (which, cut, tokens) in enumerate(script, start=1):
        parent = nodes[which % len(nodes)]
        base = logs[which % len(nodes)]
        keep = cut % (len(base) + 1)
        count = parent.count if parent is not None else 0
        made = node(f"t_{number}", parent and parent.id, keep, tokens, count)
        tree.add(made)
        nodes.append(made)
        logs.append(base[:keep] + tokens)
    for made, log in zip(nodes, logs, strict=True):
        assert tree.log(made).tolist() == log
        ancestors = [one.id for one in tree.ancestry(made)]
        assert [e.turn for e in tree.entries(made)] == ancestors[::-1]
        assert len(tree.messages(made)) == len(ancestors)


def test_old_branches_are_pruned_oldest_leaf_first_and_the_path_stays():
    tree = TurnTree()
    tree.add(node("t_1", None, 0, [1]))
    for number in range(2, MAX_BRANCH_NODES + 10):
        pruned = tree.add(node(f"t_{number}", "t_1", 1, [number], 1))
        if len(tree.nodes) < MAX_BRANCH_NODES:
            assert pruned == []
    assert "t_1" in tree.nodes
    assert "t_2" not in tree.nodes
    assert len(tree.nodes) == MAX_BRANCH_NODES + 2
    assert tree.log(tree.head).tolist() == [1, MAX_BRANCH_NODES + 9]


def test_a_continued_message_is_one_message_with_the_ids_of_both_parts():
    messages = extend([], [entry("t_1", "ab"), entry("t_2", "cd", continues="t_1")])
    assert [(m.text, m.ids) for m in messages] == [("abcd", pack([97, 98, 99, 100]))]


def test_a_node_is_found_on_any_branch():
    tree = TurnTree()
    tree.add(node("t_1", None, 0, [1]))
    tree.add(node("t_2", "t_1", 1, [2], 1))
    tree.move(tree.nodes["t_1"])
    tree.add(node("t_3", "t_1", 1, [3], 1))
    assert tree.find_entry("t_2").turn == "t_2"
    assert tree.find_entry("t_9") is None
