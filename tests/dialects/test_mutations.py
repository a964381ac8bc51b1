import os

import pytest
from dialect_mutations import ANSWER, BODIES, mutated, run
from scripted import said, scripted

SEED = int(os.environ.get("SEED", "1"))
COUNT = int(os.environ.get("COUNT", "150"))

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server():
    with scripted(said(ANSWER, repeat=True)) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_a_mutated_body_is_a_4xx_or_gets_a_right_answer(server, path):
    outcomes, wrong = run(server, path, SEED, COUNT)
    print(f"{path}: {COUNT} bodies, seed {SEED}: {dict(outcomes)}")
    assert wrong[:3] == []
    assert outcomes["200"] > COUNT // 10
    assert outcomes["400"] > COUNT // 10
    assert server.http.get("/ready").status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_the_same_seed_gives_the_same_bodies_and_the_unchanged_one_is_answered(server, path):
    assert list(mutated(path, 3, 20)) == list(mutated(path, 3, 20))
    assert server.http.post(path, json=BODIES[path]).status_code == 200
