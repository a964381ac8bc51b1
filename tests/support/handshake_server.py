"""An MCP server of the protocol of 2025 on stdio, without the package: it lists anew when told."""

import json
import sys

TOOLS = [{"name": "one", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]

# What a server may list that is not what the protocol says.
LISTS = {
    "text": "one",
    "no-schema": [{"name": "one"}],
    "array": [{"name": "one", "inputSchema": {"type": "array"}}],
    "repeated": [{"name": "same", "inputSchema": {"type": "object"}}] * 1500,
}


def odd(name, schema):
    """Return a tool with a parameter that an agentserve server refuses."""
    return {"name": name, "inputSchema": {"type": "object", "properties": {"a": schema}}}


LISTS["remote"] = [*TOOLS, *(odd(name, {"$ref": "http://x/y"}) for name in ("far", "farther"))]
LISTS["wrong-type"] = [*TOOLS, odd("odd", {"type": "strin"})]
LISTS["many"] = [{"name": f"t{number}", "inputSchema": {"type": "object"}} for number in range(500)]


def send(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def answer(method):
    if method == "initialize":
        return {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "handshake", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": LISTS.get(sys.argv[-1], TOOLS)}
    if method == "tools/call":
        TOOLS.append({"name": "two", "inputSchema": {"type": "object"}})
        send(method="notifications/tools/list_changed")
        return {"content": [{"type": "text", "text": "called"}]}
    return None


if sys.argv[1:] == ["broken"]:
    sys.stderr.write("no licence found\n")
    sys.exit(2)

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    result = answer(request["method"])
    if result is None:
        send(id=request["id"], error={"code": -32601, "message": "no such method"})
    else:
        send(id=request["id"], result=result)
