"""Reads a log file: finds out what wrote it, and makes a story of each session in it."""

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from agentserve.replay import claude_log, openai_log
from agentserve.replay.logged import BadLine, Limits, parse_json, story
from agentserve.replay.openai_log import Line, OpenedSession
from agentserve.replay.scenario import Scenario


class LogError(ValueError):
    """A log cannot be used; the message names the file and the line."""


class Log(msgspec.Struct, frozen=True):
    """What a log file holds: a story per session, its format in words, and what was changed."""

    scenarios: list[Scenario]
    format: str
    notes: list[str]


def load_log(path: Path, limits: Limits) -> Log:
    """Read a log of OpenAI messages or of Claude Code, plain or gzipped.

    Raises LogError naming the file and, where it is one line's fault, the line (from 1).
    """
    try:
        lines = _lines(path)
        sessions, kind, notes = _opened(lines)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise LogError(f"{path}: {error}") from None
    scenarios = []
    for session in sessions:
        scenario, changed = story(path.stem, session.messages, session.tools, limits)
        if scenario is not None:
            scenarios.append(scenario)
            notes += changed
        else:
            notes["sessions without an answer, left out"] += 1
    if not scenarios:
        raise LogError(f"{path}: {kind}, but without an answer of a model: nothing to replay")
    told = [f"{what}: {count}" for what, count in notes.items() if count]
    return Log(scenarios, kind, told)


def _lines(path: Path) -> list[Line]:
    lines = []
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                lines.append((number, _value(number, raw)))
    if not lines:
        raise ValueError("the file is empty")
    return lines


def _value(number: int, raw: bytes) -> Any:
    try:
        return parse_json(raw.decode())
    except UnicodeDecodeError as error:
        raise BadLine(number, f"not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        where = f"not JSON: {error.msg} (column {error.colno})"
        raise BadLine(number, f"{where}; a log has one JSON value on each line") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(number, f"not usable JSON: {error}") from None


def _opened(lines: list[Line]) -> tuple[list[OpenedSession], str, Counter[str]]:
    """Return the sessions, the format, and what was left out; the first line that tells decides."""
    for _, value in lines:
        if claude_log.has_line(value):
            sessions, notes = claude_log.read_tree(lines)
            return sessions, f"a session log of Claude Code, {_count(sessions)}", notes
        if openai_log.has_session(value):
            sessions, dropped = openai_log.read_sessions(lines)
            notes = Counter({"lines that a later line continues, left out": dropped})
            return sessions, f"OpenAI messages, a session per line, {_count(sessions)}", notes
        if openai_log.has_message(value):
            sessions = openai_log.read_messages(lines)
            return sessions, f"OpenAI messages, a message per line, {_count(sessions)}", Counter()
    raise ValueError(
        "no line is a list of OpenAI messages, a message with a role, or a line of a session log "
        "of Claude Code"
    )


def _count(sessions: list[OpenedSession]) -> str:
    return "1 session" if len(sessions) == 1 else f"{len(sessions)} sessions"
