"""How often does the embedded model call the right tool, is every call valid, what saves time?

1. Right calls. 40 prompts that appear nowhere in the tools' descriptions, 4 tools, greedy decoding,
four modes:

free         the tools are described in the system message; nothing else helps
example      the tools are declared, so that the server's prompt begins with a worked example of
             each; tool_choice none: no grammar
constrained  the same prompt, tool_choice auto: once a call opens, only valid calls are allowed
forced       the same prompt, tool_choice required: a call is demanded from the first token

In the first two a call is read from the text as leniently as possible: the first JSON object with a
name. The wording of the server's prompt was chosen with every fifth of these prompts (8 of the 40).

2. Valid calls. 200 turns that are constrained as by default: the prompts again and again, the first
time greedily, then sampled. Every call that is emitted must satisfy its tool's schema.

3. Early calls. A turn with two calls, of which the first is of a tool that takes a second and the
second has long arguments, until both results are in. In turn with a first tool that is read-only,
so that it runs while the second call is still generated, and with one that is not. The outputs are
forced, so that the two are the same work.

    python benchmarks/bench_tools.py [--limit N] [--turns N] [--repeats N]
                                     [--output benchmarks/results/tools.json]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
from agentserve_tools import Toolbox, tool
from circumstances import circumstances

from agentserve import AsyncClient, ToolDone
from agentserve.config import ServerSettings

MODEL = "smollm2-135m"
MAX_OUTPUT_TOKENS = 64
TOOL_CHOICE: dict[str, Literal["none", "auto", "required"]] = {
    "free": "none",
    "example": "none",
    "constrained": "auto",
    "forced": "required",
}
CONCURRENCY = 16
TEMPERATURE = 0.8
TOOL_S = 1.0
NOTE = " ".join(f"{number} bottles" for number in range(20, 0, -1))


@tool(examples=[{"input": "What is the weather in Oslo?", "arguments": {"city": "Oslo"}}])
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return city


@tool(examples=[{"input": "Set a timer for 25 minutes.", "arguments": {"minutes": 25}}])
def set_timer(minutes: int) -> str:
    """Start a timer."""
    return str(minutes)


@tool(examples=[{"input": "Show me docs/intro.txt.", "arguments": {"path": "docs/intro.txt"}}])
def read_file(path: str) -> str:
    """Show what is in a file."""
    return path


@tool(
    examples=[
        {
            "input": "Translate bread to German.",
            "arguments": {"word": "bread", "language": "german"},
        }
    ]
)
def translate(word: str, language: Literal["german", "french", "spanish", "italian"]) -> str:
    """Translate a word."""
    return f"{word} {language}"


Case = tuple[str, str, dict[str, Any]]
CASES: list[Case] = [
    ("What is the weather like in Paris?", "get_weather", {"city": "Paris"}),
    ("Is it raining in London right now?", "get_weather", {"city": "London"}),
    ("How warm is it in Madrid?", "get_weather", {"city": "Madrid"}),
    ("Tell me the weather in Tokyo.", "get_weather", {"city": "Tokyo"}),
    ("Do I need an umbrella in Hamburg today?", "get_weather", {"city": "Hamburg"}),
    ("Weather for Chicago, please.", "get_weather", {"city": "Chicago"}),
    ("I fly to Rome tomorrow. How is the weather there?", "get_weather", {"city": "Rome"}),
    ("Is there snow in Helsinki?", "get_weather", {"city": "Helsinki"}),
    ("Check the weather in Cairo for me.", "get_weather", {"city": "Cairo"}),
    ("What's the temperature in Sydney?", "get_weather", {"city": "Sydney"}),
    ("Set a timer for 10 minutes.", "set_timer", {"minutes": 10}),
    ("Remind me in 5 minutes.", "set_timer", {"minutes": 5}),
    ("My eggs need 7 minutes, start a timer.", "set_timer", {"minutes": 7}),
    ("Start a timer of 45 minutes for the laundry.", "set_timer", {"minutes": 45}),
    ("Timer, 3 minutes.", "set_timer", {"minutes": 3}),
    ("The pizza is done in 12 minutes. Set a timer.", "set_timer", {"minutes": 12}),
    ("Can you set a timer for 90 minutes?", "set_timer", {"minutes": 90}),
    ("I want to nap for 20 minutes, wake me with a timer.", "set_timer", {"minutes": 20}),
    ("Count down 15 minutes.", "set_timer", {"minutes": 15}),
    ("Please start a 30 minute timer.", "set_timer", {"minutes": 30}),
    ("Show me the file notes.txt.", "read_file", {"path": "notes.txt"}),
    ("What is in src/main.py?", "read_file", {"path": "src/main.py"}),
    ("Open README.md.", "read_file", {"path": "README.md"}),
    ("Read config.yaml and show it to me.", "read_file", {"path": "config.yaml"}),
    ("Print the contents of data/users.csv.", "read_file", {"path": "data/users.csv"}),
    ("Let me see setup.cfg.", "read_file", {"path": "setup.cfg"}),
    ("I need to look at tests/test_api.py.", "read_file", {"path": "tests/test_api.py"}),
    ("Display the file log.txt.", "read_file", {"path": "log.txt"}),
    ("What does the file Makefile contain?", "read_file", {"path": "Makefile"}),
    ("Read the file report.html.", "read_file", {"path": "report.html"}),
    ("How do you say cat in French?", "translate", {"word": "cat", "language": "french"}),
    ("Translate house to Spanish.", "translate", {"word": "house", "language": "spanish"}),
    ("What is the German word for tree?", "translate", {"word": "tree", "language": "german"}),
    (
        "Translate the word water into Italian.",
        "translate",
        {"word": "water", "language": "italian"},
    ),
    ("Give me the Spanish for sun.", "translate", {"word": "sun", "language": "spanish"}),
    ("What is moon in French?", "translate", {"word": "moon", "language": "french"}),
    ("How do Germans say window?", "translate", {"word": "window", "language": "german"}),
    ("Translate friend to Italian.", "translate", {"word": "friend", "language": "italian"}),
    ("I need the French word for cheese.", "translate", {"word": "cheese", "language": "french"}),
    ("Say river in Spanish.", "translate", {"word": "river", "language": "spanish"}),
]

TOOLBOX = Toolbox([get_weather, set_timer, read_file, translate])
Call = dict[str, Any]


def described() -> str:
    """The tools in words and schemas, without a worked example."""
    lines = [
        "You can use these tools. To use one, answer with one line of JSON that has the tool's "
        '"name" and its "arguments".'
    ]
    lines += [
        f"- {spec.name}: {spec.description} Arguments: {json.dumps(spec.parameters['properties'])}"
        for spec in TOOLBOX.specs
    ]
    return "\n".join((*lines, "When you have what you need, answer in plain text."))


def json_objects(text: str) -> Iterator[Any]:
    """Every JSON object that begins somewhere in the text."""
    decoder = json.JSONDecoder()
    for start, char in enumerate(text):
        if char == "{":
            try:
                yield decoder.raw_decode(text, start)[0]
            except ValueError:
                continue


def call_in(text: str) -> Call | None:
    """The first call that can be read from free text."""
    for value in json_objects(text):
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            return {"name": value["name"], "arguments": value.get("arguments")}
    return None


def is_valid(call: Call | None) -> bool:
    """Whether the call names a tool and its arguments satisfy that tool's schema."""
    if call is None or call["name"] not in TOOLBOX:
        return False
    schema = TOOLBOX[call["name"]].spec.parameters
    return bool(jsonschema.Draft202012Validator(schema).is_valid(call["arguments"]))


def is_right(call: Call | None, name: str, arguments: dict[str, Any]) -> bool:
    """Whether it is the expected call; upper and lower case count as equal."""
    return (
        call is not None and call["name"] == name and folded(call["arguments"]) == folded(arguments)
    )


def folded(arguments: Any) -> Any:
    if not isinstance(arguments, dict):
        return arguments
    return {k: v.strip().casefold() if isinstance(v, str) else v for k, v in arguments.items()}


async def ask(client: AsyncClient, mode: str, prompt: str) -> Call | None:
    """Return the first call that the model makes for `prompt` in a session of its own."""
    if mode == "free":
        session = await client.session(system=described())
    else:
        session = await client.session(tools=[TOOLBOX[name].function for name in TOOLBOX])
    turn = await session.step(
        prompt, max_output_tokens=MAX_OUTPUT_TOKENS, tool_choice=TOOL_CHOICE[mode]
    )
    if TOOL_CHOICE[mode] == "none":
        return call_in(turn.text)
    calls = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
    return calls[0] if calls else None


async def right_calls(client: AsyncClient, cases: list[Case]) -> dict[str, Any]:
    """Ask every prompt in every mode; return counts and every single answer."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def judged(mode: str, case: Case) -> dict[str, Any]:
        prompt, name, arguments = case
        async with places:
            call = await ask(client, mode, prompt)
        return {
            "call": call,
            "valid": is_valid(call),
            "right": is_right(call, name, arguments),
        }

    found = {
        mode: await asyncio.gather(*(judged(mode, case) for case in cases)) for mode in TOOL_CHOICE
    }
    counts = {
        mode: {
            "right": sum(one["right"] for one in answers),
            "valid": sum(one["valid"] for one in answers),
            "any_call": sum(one["call"] is not None for one in answers),
        }
        for mode, answers in found.items()
    }
    answers = [
        {"prompt": prompt, "name": name, "arguments": arguments}
        | {mode: found[mode][number] for mode in TOOL_CHOICE}
        for number, (prompt, name, arguments) in enumerate(cases)
    ]
    return {"prompts": len(cases), "counts": counts, "answers": answers}


async def valid_calls(client: AsyncClient, turns: int) -> dict[str, Any]:
    """Run constrained turns; return how many calls came and how many of them are not valid."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def calls_of(number: int) -> dict[str, int]:
        again, case = divmod(number, len(CASES))
        sampling = {"temperature": TEMPERATURE, "seed": number} if again else {}
        async with places:
            session = await client.session(tools=[TOOLBOX[name].function for name in TOOLBOX])
            turn = await session.step(
                CASES[case][0], max_output_tokens=MAX_OUTPUT_TOKENS, sampling=sampling
            )
        made = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
        return {
            "turns_with_calls": bool(made),
            "calls": len(made),
            "invalid": sum(not is_valid(call) for call in made),
            "schema_errors": sum(bool(call.schema_errors) for call in turn.tool_calls),
            "malformed": len(turn.malformed_calls),
            "truncated": turn.stop_reason == "max_tokens",
        }

    counts = await asyncio.gather(*map(calls_of, range(turns)))
    return {"turns": turns} | {name: sum(one[name] for one in counts) for name in counts[0]}


class _ResultsAreIn(Exception):
    """Ends a run."""


async def results_in_s(client: AsyncClient, read_only: bool) -> float:
    """Return the seconds from a request to both results of its turn."""

    @tool(read_only=read_only)
    async def look(what: str) -> str:
        await asyncio.sleep(TOOL_S)
        return what

    async def note(text: str) -> str:
        return text

    ended = 0

    def on_event(event: Any) -> None:
        nonlocal ended
        ended += isinstance(event, ToolDone)
        if ended == 2:
            raise _ResultsAreIn

    session = await client.session(tools=[look, note])
    force = [
        {"type": "tool_call", "name": "look", "arguments": {"what": "here"}},
        {"type": "tool_call", "name": "note", "arguments": {"text": NOTE}},
    ]
    started = time.perf_counter()
    try:
        await session.run("Go.", max_turns=2, on_event=on_event, debug={"force": force})
    except _ResultsAreIn:
        return time.perf_counter() - started
    finally:
        await session.delete()
    raise RuntimeError("the forced calls were not made")


async def early_calls(client: AsyncClient, repeats: int) -> dict[str, Any]:
    """Return the seconds of both kinds in turn, their medians, and what is saved."""
    runs: dict[str, list[float]] = {"early": [], "after the turn": []}
    await results_in_s(client, read_only=True)  # now what all prompts begin with is cached
    for _ in range(repeats):
        runs["early"].append(await results_in_s(client, read_only=True))
        runs["after the turn"].append(await results_in_s(client, read_only=False))
    medians = {kind: statistics.median(seconds) for kind, seconds in runs.items()}
    return {
        "tool_s": TOOL_S,
        "runs_s": runs,
        "median_s": medians,
        "saved_s": medians["after the turn"] - medians["early"],
    }


async def measure(limit: int, turns: int, repeats: int) -> dict[str, Any]:
    """Do all three, one after the other."""
    settings = ServerSettings(allow_force=True, max_sessions=10_000)
    async with AsyncClient.embedded(MODEL, server=settings) as client:
        return await right_calls(client, CASES[:limit]) | {
            "valid_calls": await valid_calls(client, turns),
            "early_calls": await early_calls(client, repeats),
        }


def table(result: dict[str, Any]) -> str:
    total = result["prompts"]
    rows = [f"{'mode':<13}{'right':>8}{'valid':>8}{'any call':>10}   of {total} prompts"]
    for mode, counts in result["counts"].items():
        rows.append(f"{mode:<13}{counts['right']:>8}{counts['valid']:>8}{counts['any_call']:>10}")
    valid, early = result["valid_calls"], result["early_calls"]
    rows.append(
        f"constrained turns: {valid['turns']}, calls: {valid['calls']}, not valid: "
        f"{valid['invalid']}, malformed: {valid['malformed']}, cut at {MAX_OUTPUT_TOKENS} tokens: "
        f"{valid['truncated']}"
    )
    rows.append(
        f"results are in after {early['median_s']['early']:.2f} s with an early call, "
        f"{early['median_s']['after the turn']:.2f} s without: {early['saved_s']:.2f} s saved"
    )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tool calls of the embedded model in four modes.")
    parser.add_argument(
        "--limit", type=int, default=len(CASES), help="ask only the first N prompts"
    )
    parser.add_argument("--turns", type=int, default=200, help="constrained turns")
    parser.add_argument("--repeats", type=int, default=10, help="of each kind of early call")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tools.json"))
    options = parser.parse_args()
    head = circumstances("tools") | {"model": MODEL}
    result = head | asyncio.run(measure(options.limit, options.turns, options.repeats))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
