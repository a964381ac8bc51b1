"""Mutated bodies of dialect requests, and what came of them: a 4xx or a right answer.

The server runs the scripted engine; tests/support/dialect_mutations.py makes the bodies and judges.

    python benchmarks/mutated_bodies.py [--count 5000] [--seed 1]

Exits with 1 if an answer is wrong or a 5xx.
"""

import argparse
import json
import sys
from pathlib import Path

from circumstances import circumstances
from dialect_mutations import ANSWER, BODIES, run
from scripted import said, scripted

RESULT = Path(__file__).parent / "results" / "mutated_bodies.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="bodies a dialect (default 5000)")
    parser.add_argument("--seed", type=int, default=1, help="of the bodies (default 1)")
    parser.add_argument("--json", type=Path, default=RESULT, help="where the result goes")
    options = parser.parse_args()
    result = circumstances("mutated bodies") | {"seed": options.seed, "bodies": options.count}
    outcomes: dict[str, dict[str, int]] = {}
    wrong = []
    with scripted(said(ANSWER, repeat=True)) as server:
        for path in BODIES:
            counts, bad = run(server, path, options.seed, options.count)
            outcomes[path] = dict(counts.most_common())
            wrong += bad
            print(f"{path}: {outcomes[path]}, {len(bad)} wrong", flush=True)
    result |= {"outcomes": outcomes, "wrong": len(wrong)}
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    for status, text, body in wrong[:5]:
        print(status, text, body)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
