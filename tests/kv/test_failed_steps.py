from kv_device import tokens_of


def test_what_a_failed_turn_wrote_is_not_found_while_others_still_use_it(device):
    d = device()
    log = tokens_of(range(12))
    failing, sharing, later = (d.kv.open("a") for _ in range(3))
    d.kv.acquire(failing, log)
    assert d.write(failing, log, 8)
    assert d.kv.acquire(sharing, log) == 8
    assert d.write(failing, log, 12, garbage=True)
    d.kv.discard(failing)
    assert d.kv.acquire(later, log) == 0
    for chain in (sharing, later):
        assert d.write(chain, log, 12)
        d.end(chain)
    assert d.kv.acquire(failing, log) == 11
    d.end(failing)
