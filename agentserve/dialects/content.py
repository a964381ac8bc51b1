"""Message content of every dialect as text; what is no text is named in its place."""

from collections.abc import Callable
from typing import Any

from agentserve.errors import InvalidRequest

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_OMITTED = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "audio": "audio",
    "file": "file",
    "input_file": "file",
    "document": "document",
    "search_result": "search result",
}
BILLING = "x-anthropic-billing-header:"  # differs from request to request in some versions

Warn = Callable[[str], None]


def text_of(content: Any, warn: Warn, param: str, between: str = "\n") -> str:
    """Return content (nothing, a string, or a list of parts) as one string.

    Parts are joined by line breaks, those of an answer by nothing. Raises InvalidRequest for what
    is neither.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest("content is a string or a list of parts", param=param)
    return between.join(_part(part, warn, param) for part in content)


def _part(part: Any, warn: Warn, param: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("a part of content is an object with a type", param=param)
    kind = string(part.get("type", "text"), param)
    if kind in _TEXTS:
        return string(part.get("text"), param)
    if kind == "refusal":
        return string(part.get("refusal"), param)
    if kind == "document" and isinstance(part.get("source"), dict):
        source = part["source"]
        if source.get("type") == "text":
            return string(source.get("data"), param)
    name = _OMITTED.get(kind, "part of an unknown type")
    warn(f"{name} omitted")
    return f"[{name} omitted]"


def string(value: Any, param: str) -> str:
    """Return a string; raises InvalidRequest for anything else."""
    if not isinstance(value, str):
        raise InvalidRequest("text is a string", param=param)
    return value


def system_text(texts: list[str]) -> str | None:
    """Return what stands before the conversation as one text; None when there is none."""
    kept = [text for text in texts if text and not text.startswith(BILLING)]
    return "\n\n".join(kept) if kept else None
