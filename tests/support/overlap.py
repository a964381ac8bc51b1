"""What the tests of an engine with a step in flight share."""

from engine_driver import Driver, alone

PROMPT = list(range(20))
OUTPUT = alone(PROMPT, 40)
STOP = 6  # place in OUTPUT of a token that does not come before


def ahead(**options) -> Driver:
    return Driver(**{"depth": 1, "block_size": 4, **options})


def rows_of(driver: Driver) -> int:
    """Return how many tokens all plans compute."""
    return sum(row.count for plan in driver.runner.plans for row in plan.rows)


def ends(driver: Driver) -> dict:
    """Return what each turn gave and how it ended, without times."""
    told = ("reason", "log_length", "kv_length", "stop_id", "message")
    return {
        turn: (driver.output[turn], *(getattr(end, name) for name in told))
        for turn, end in driver.finished.items()
    }


def assert_nothing_is_left(driver: Driver) -> None:
    driver.engine.check()
    stats = driver.engine.stats()
    assert stats.running == stats.waiting == stats.blocks_locked == stats.host_locked == 0
    assert not driver.engine.busy
