from agentserve.engine.plan import pack
from agentserve.kv.blocks import Slot
from agentserve.kv.prefix import PrefixIndex, sha256


def entry(index, parent, tokens, namespace="a"):
    block = index.seal(parent, pack(tokens), namespace)
    block.copies["device"] = Slot(0)
    return index.intern(block)


def test_a_block_is_found_by_its_parent_tokens_and_namespace():
    index = PrefixIndex("m")
    root = entry(index, None, [1, 2])
    child = entry(index, root, [3, 4])
    assert index.find(None, pack([1, 2]), "a") is root
    assert index.find(root, pack([3, 4]), "a") is child
    assert index.find(None, pack([3, 4]), "a") is None
    assert index.find(None, pack([1, 2]), "b") is None
    index.check()


def test_another_model_gives_other_keys():
    one, two = PrefixIndex("m1"), PrefixIndex("m2")
    digests = {i.seal(None, pack([1]), "a").digest for i in (one, two)}
    assert len(digests) == 2


def test_names_that_join_to_the_same_text_give_different_keys():
    digests = {
        PrefixIndex(identity).seal(None, pack([1]), namespace).digest
        for identity, namespace in (("bc", "a"), ("c", "ab"))
    }
    assert len(digests) == 2


def test_the_later_of_two_equal_blocks_stays_unindexed():
    index = PrefixIndex("m")
    first = entry(index, None, [1, 2])
    later = index.seal(None, pack([1, 2]), "a")
    later.copies["device"] = Slot(1)
    assert index.intern(later) is first
    assert not later.indexed
    assert len(index) == 1


def test_equal_digests_of_other_tokens_are_not_a_hit():
    index = PrefixIndex("m", digest=lambda data: b"same")
    first = entry(index, None, [1, 2])
    other = index.seal(None, pack([7, 8]), "a")
    assert index.find(None, pack([7, 8]), "a") is None
    assert index.intern(other) is None
    assert index.find(None, pack([1, 2]), "a") is first


def test_equal_digest_and_tokens_after_another_parent_are_not_a_hit():
    index = PrefixIndex("m", digest=lambda data: sha256(data[-4:])[:1] + data[8:12])
    one, two = entry(index, None, [1]), entry(index, None, [2])
    child = entry(index, one, [9])
    assert child is not None
    assert index.twin(two, child) is None
    assert index.twin(one, child) is child


def test_an_entry_without_a_copy_leaves_the_index():
    index = PrefixIndex("m")
    block = entry(index, None, [1])
    index.cleared(block)
    assert len(index) == 1
    block.copies.clear()
    index.cleared(block)
    assert len(index) == 0
    assert not block.indexed


def test_a_block_after_an_unindexed_one_is_not_indexed():
    index = PrefixIndex("m")
    loose = index.seal(None, pack([1]), "a")
    assert index.intern(index.seal(loose, pack([2]), "a")) is None
    assert index.find(loose, pack([2]), "a") is None


def test_a_condemned_block_is_never_indexed_again():
    index = PrefixIndex("m")
    block = entry(index, None, [1])
    index.condemn(block)
    assert index.intern(block) is None
