"""What every test run reports at its end."""

from counts import COUNTS


def pytest_terminal_summary(terminalreporter):
    """Print how much the simulation and the state machines did."""
    for name, count in sorted(COUNTS.items()):
        terminalreporter.write_line(f"{name}: {count}")
