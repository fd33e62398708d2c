"""Models that tests share, and the command line to compare with."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import moeflux
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = REPOSITORY / "models/demo/demo.gguf"
FIXTURES = REPOSITORY / "crates/engine/tests/fixtures"

# Shells start what runs in the background with SIGINT ignored, and then Ctrl-C would not be Python's to raise.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model() -> Iterator[moeflux.Model]:
    """The demo, all of it in memory."""
    with moeflux.open("demo", backend="cpu", context=512) as opened:
        yield opened


@pytest.fixture(scope="session")
def cli() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs the command line."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    binary = os.environ.get("MOEFLUX", target / "debug/moeflux")

    def run(*arguments: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
        command = [str(binary), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run
