"""`make bench-scan`: how long adversarial outputs take to read, and whether that is linear.

    PYTHONPATH=benchmarks:tests/support python benchmarks/scan_speed.py [--json]

Each family reads outputs of 1 MB that are made to be slow: in one piece, the half of it (the ratio
of both times is 2 where the work is linear), and 20 kB in pieces of four characters, as tokens
come. CPU time of the scanner and of what makes items and events of it, schema checks included.
"calls" is no attack: 1 MB of small calls that are all right.
"""

import argparse
import json
import time
from typing import Any

import adversarial_outputs
import msgspec
from circumstances import ROOT, circumstances
from scanned import Scanned

RESULT = ROOT / "benchmarks/results/scan_speed.json"
SIZE, GOAL_MS = 1_000_000, 50.0
PIECE, STREAMED = 4, 20_000


def seconds(format: Any, pieces: list[str]) -> float:
    """Return the CPU time of a scan: the least of three, because the machine is shared."""
    times = []
    for _ in range(3):
        began = time.process_time()
        Scanned(format, pieces)
        times.append(time.process_time() - began)
    return min(times)


def measure(format: Any) -> list[dict[str, Any]]:
    """Return a row for each kind of output."""
    format = msgspec.structs.replace(format, one_call=False)
    rows = []
    for label, text in adversarial_outputs.outputs(format, SIZE):
        whole, half = seconds(format, [text]), seconds(format, [text[: len(text) // 2]])
        some = text[:STREAMED]
        streamed = seconds(format, [some[i : i + PIECE] for i in range(0, len(some), PIECE)])
        rows.append(
            {
                "family": format.name,
                "output": label,
                "ms_per_100_kb": round(whole * 1e8 / len(text), 1),
                "ratio_to_half": round(whole / half, 2) if half > 0.005 else None,
                "streamed_us_per_piece": round(streamed * 1e6 * PIECE / len(some), 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    head = circumstances("scan_speed")
    rows = [row for format in adversarial_outputs.families() for row in measure(format)]
    rows.sort(key=lambda row: -row["ms_per_100_kb"])
    attacks = [row for row in rows if row["output"] != "calls"]
    summary = {
        "outputs": len(rows),
        "goal_ms_per_100_kb": GOAL_MS,
        "over_goal": sum(row["ms_per_100_kb"] > GOAL_MS for row in attacks),
        "worst_ms_per_100_kb": attacks[0]["ms_per_100_kb"],
        "worst_ratio_to_half": max(row["ratio_to_half"] or 0 for row in rows),
        "worst_streamed_us_per_piece": max(row["streamed_us_per_piece"] for row in rows),
    }
    for row in rows[:20]:
        print(
            "{ms_per_100_kb:7.1f} ms per 100 kB  x{ratio_to_half}  {family}: {output}".format(**row)
        )
    print(json.dumps(summary, indent=1))
    if options.json:
        result = {**head, **summary, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
