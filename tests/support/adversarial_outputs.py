"""Outputs that are made to be slow to read."""

from agentserve.sessions.toolformat import FORMATS
from agentserve.spoken import SPOKEN

UNITS = {
    "braces": "{",
    "brackets": "[",
    "closing braces": "}",
    "quotes": '"',
    "backslashes": "\\",
    "spaces": " ",
    "lines": "\n",
    "angles": "<",
    "objects": '{"name": ',
    "names": '{"name": "grep", ',
    "spaced objects": "{" + " " * 200,
    "openings": '{"name": "grep", "arguments": {',
    "nested names": '{{"name": "',
    "cut objects": '{{"name": "a", ',
    "unknown names": '{"name": "x", "arguments": {',
    "lists of objects": "[{",
    "python": "[grep(limit=",
    "headers": " to=functions.grep",
    "half values": "</parameter>\n</arg_value>\n",
}


def outputs(format, size):
    """Yield (label, text of about `size` characters) for one family."""
    for label, unit in UNITS.items():
        yield label, unit * (size // len(unit))
    for marker in sorted(
        SPOKEN & {*format.form.markers, *format.form.noise, *(format.reasoning or ())}
    ):
        yield marker, marker * (size // len(marker))
        yield f"{marker} and a brace", f"{marker}{{" * (size // len(marker))
        yield f"{marker} cut", marker[:-1] * (size // len(marker))
        yield f"{marker} then text", marker + "x <" * (size // 3)
    call = format.call("write", {"text": "@", "options": "#"})
    for label, unit in {**UNITS, "escapes": '\\"', "surrogates": "\\ud83d", "commas": "1,"}.items():
        many = unit * (size // len(unit))
        yield f"{label} in a string", call.replace("@", many)
        yield f"{label} in a value", call.replace('"#"', many).replace("#", many)
        yield f"{label} in a cut call", call[: call.index("@")] + many
    yield "calls", (call + "\n") * (size // len(call))
    yield "text", "Some words, a line. " * (size // 20)


def families():
    """Return every format."""
    return list(FORMATS.values())
