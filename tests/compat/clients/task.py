"""The task of every framework: a question that takes two rounds of calls, and one more question."""

import json
import sys

QUESTION = "Is it warmer in Besançon or in Tromsø?"
ANSWER = "In Besançon: 18 degrees against 4."
FOLLOW_UP = "And what should I pack?"
LAST_ANSWER = "A light jacket."

_REPORTS = {"Besançon": "18 degrees, sunny", "Tromsø": "4 degrees, snow"}


def get_weather(city: str, days: int = 1) -> str:
    """Tell the weather in a city.

    Args:
        city: The city.
        days: For how many days.
    """
    return f"{_REPORTS[city]}, for {days} day(s)"


def arguments() -> tuple[str, list[str]]:
    """Return the server's address and the driver's further arguments."""
    return sys.argv[1], sys.argv[2:]


def finish(*answers: str) -> None:
    """Hand the runner what the agent answered."""
    print(json.dumps(answers, ensure_ascii=False))
