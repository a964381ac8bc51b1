"""Counts that the test run reports at its end: simulation seeds, state-machine steps."""

from collections import Counter

COUNTS: "Counter[str]" = Counter()
