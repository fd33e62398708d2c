"""Predictions, which are those of the command line."""

import json
import warnings

import moeflux
import pytest

from conftest import FIXTURES


@pytest.fixture(autouse=True)
def busy_is_fine():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "other programs take")
        yield


def test_plans_are_the_command_lines(cli):
    options = {"memory": ["14MiB", 64 << 20], "prompt": 32, "backend": "cpu"}
    plan = moeflux.plan("demo", **options)
    line = cli("plan", "demo", "--memory=14MiB,64MiB", "--prompt=32", "--backend=cpu", "--json")
    said = json.loads(line.stdout)
    assert plan.keys() == said.keys() and plan["needs"] == said["needs"]
    assert plan["parameters"] == said["parameters"] and plan["note"] == "on disk"
    for ours, theirs in zip(plan["budgets"], said["budgets"], strict=True):
        for key in ("memory", "experts_held", "chunk"):
            assert ours[key] == theirs[key]
        assert ours["predicted"]["hit_rate"] == theirs["predicted"]["hit_rate"]
        assert ours["predicted"]["decode_tokens_per_second"] > 0


def test_a_configuration_is_enough():
    config = FIXTURES / "hf/qwen3_moe_basic/config.json"
    plan = moeflux.plan(config, quant="q4_k_m", prompt=8, backend="cpu")
    assert plan["note"].startswith("configuration only, as") and plan["needs"]["minimum"] > 0


def test_what_cannot_be_planned():
    for error, arguments in [
        (moeflux.OptionError, {"prompt": 0}),
        (moeflux.OptionError, {"skew": -1.0}),
        (moeflux.OptionError, {"quant": "q4_k_m"}),
        (moeflux.OptionError, {"quant": "q9"}),
        (moeflux.OptionError, {"memory": "much"}),
        (moeflux.BudgetError, {"memory": "1MiB", "prompt": 8}),
        (moeflux.MissingFileError, {"trace": "/nowhere"}),
    ]:
        with pytest.raises(error):
            moeflux.plan("demo", backend="cpu", **arguments)
    with pytest.raises(moeflux.Error):
        moeflux.plan("synth:nothing")
