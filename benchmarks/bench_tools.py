"""How often does the embedded model call the right tool, and how often validly at all?

40 prompts that appear nowhere in the tools' descriptions, 4 tools, greedy decoding, four modes:

free         the tools are described in the system message; nothing else helps
example      the tools are declared, so that the server's prompt begins with a worked example of
             each; tool_choice none: no grammar
constrained  the same prompt, tool_choice auto: once a call opens, only valid calls are allowed
forced       the same prompt, tool_choice required: a call is demanded from the first token

In the first two a call is read from the text as leniently as possible: the first JSON object with a
name. The wording of the server's prompt was chosen with every fifth of these prompts (8 of the 40).

    python benchmarks/bench_tools.py [--limit N] [--output benchmarks/results/tools.json]
"""

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
from agentserve_tools import Toolbox, tool
from circumstances import circumstances

from agentserve import AsyncClient

MODEL = "smollm2-135m"
MAX_OUTPUT_TOKENS = 64
TOOL_CHOICE: dict[str, Literal["none", "auto", "required"]] = {
    "free": "none",
    "example": "none",
    "constrained": "auto",
    "forced": "required",
}
CONCURRENCY = 16


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


async def measure(cases: list[Case]) -> dict[str, Any]:
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

    async with AsyncClient.embedded(MODEL) as client:
        found = {
            mode: await asyncio.gather(*(judged(mode, case) for case in cases))
            for mode in TOOL_CHOICE
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


def table(result: dict[str, Any]) -> str:
    total = result["prompts"]
    rows = [f"{'mode':<13}{'right':>8}{'valid':>8}{'any call':>10}   of {total} prompts"]
    for mode, counts in result["counts"].items():
        rows.append(f"{mode:<13}{counts['right']:>8}{counts['valid']:>8}{counts['any_call']:>10}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tool calls of the embedded model in four modes.")
    parser.add_argument(
        "--limit", type=int, default=len(CASES), help="ask only the first N prompts"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tools.json"))
    options = parser.parse_args()
    head = circumstances("tools") | {"model": MODEL}
    result = head | asyncio.run(measure(CASES[: options.limit]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
