"""Which clients are run, how, and what each has to come to."""

from dataclasses import dataclass

from clients.task import ANSWER, LAST_ANSWER


@dataclass(frozen=True)
class Case:
    """One client in one configuration.

    `environment` is one of `install.environments`, empty for this Python. `answers` is what the
    driver has to print, `turns` how many requests that takes, `seconds` the time it has. A client
    that `rewrites` sends other texts for the answers that it got.
    """

    name: str
    driver: str
    environment: str
    arguments: tuple[str, ...] = ()
    script: str = "weather.json"
    answers: tuple[str, ...] = (ANSWER, LAST_ANSWER)
    turns: int = 4
    rewrites: bool = False
    seconds: float = 600


def _frameworks(name: str, driver: str, *forms: str) -> list[Case]:
    """Return one framework's cases, one for each form of its requests."""
    return [Case(f"{name}, {form}", driver, "frameworks", (form,)) for form in forms]


CASES = [
    *_frameworks("openai-agents", "openai_agents.py", "responses", "chained", "chat"),
    *_frameworks("langgraph", "langgraph_agent.py", "chat", "responses", "chained"),
    *_frameworks("pydantic-ai", "pydantic_ai_agent.py", "chat", "responses", "chained", "messages"),
    *_frameworks("litellm", "litellm_loop.py", "chat", "streamed", "responses", "messages"),
    Case(
        "smolagents",
        "smolagents_agent.py",
        "frameworks",
        script="smolagents.json",
        turns=3,
        rewrites=True,
    ),
    Case(
        "mini-swe-agent",
        "mini_swe.py",
        "frameworks",
        script="mini_swe.json",
        answers=("hello, world",),
        turns=3,
    ),
    Case(
        "Claude Code",
        "launched.py",
        "",
        ("claude",),
        script="claude.json",
        answers=("The tests pass now.",),
        turns=3,
    ),
    Case(
        "Codex",
        "launched.py",
        "",
        ("codex",),
        script="codex.json",
        answers=("The tests pass now.",),
        turns=3,
    ),
]
