"""The package itself: types, what importing costs, documentation."""

import doctest
import re
import subprocess
import sys

import moeflux
import pytest

from conftest import REPOSITORY


def test_types_are_those_of_the_module(tmp_path):
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "moeflux", "--ignore-disjoint-bases"], capture_output=True, text=True, cwd=tmp_path
    )
    assert checked.returncode == 0, checked.stdout


def test_documentation_is_typed(tmp_path):
    (tmp_path / "example.py").write_text("\n".join(examples()))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "example.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert checked.returncode == 0, checked.stdout


def examples():
    text = (REPOSITORY / "docs/python.md").read_text() + (REPOSITORY / "crates/python/README.md").read_text()
    found = re.findall("```python\n(.*?)```", text, re.DOTALL)
    assert len(found) > 4
    return found


def test_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in examples():
        exec(compile(example, "docs/python.md", "exec"), {})


def test_the_readmes_command_runs(tmp_path):
    (code,) = re.findall("^python -c '(.*?)'$", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(code.strip().splitlines()) < 5
    assert len(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path)) > 40


def test_the_modules_own_example_is_right():
    assert doctest.testmod(moeflux).attempted == 3
    assert doctest.testmod(moeflux).failed == 0


def test_everything_is_documented():
    for name in moeflux.__all__:
        value = getattr(moeflux, name)
        assert name == "__version__" or value.__doc__, name
        members = vars(value).items() if isinstance(value, type) else ()
        for member, method in members:
            assert member.startswith("_") or method.__doc__ or issubclass(value, Exception), f"{name}.{member}"


def test_importing_is_light():
    code = "import sys, moeflux; print(*[name for name in ('numpy', 'asyncio', 'typing_extensions') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


@pytest.mark.parametrize("name", ["Model", "Stream", "Chat", "Session", "Tokenizer"])
def test_handles_are_made_by_models_alone(name):
    with pytest.raises(TypeError, match="cannot create|No constructor"):
        getattr(moeflux, name)()
