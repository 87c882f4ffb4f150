"""A machine that lacks something is told what, before pip starts."""

import subprocess
import venv
from pathlib import Path
from typing import Any

from jaxrl.preflight import lacking

ROOT = Path(__file__).parents[1]


def ready(tmp_path, **changed):
    (tmp_path / "Python.h").touch()
    machine: dict[str, Any] = {
        "version": (3, 11),
        "include": str(tmp_path),
        "compilers": ["cc"],
        "which": lambda name: f"/bin/{name}",
        "has_module": lambda name: True,
    }
    return lacking(**(machine | changed))


def test_a_ready_machine_lacks_nothing(tmp_path):
    assert ready(tmp_path) == []


def test_each_lack_is_named_with_its_remedy(tmp_path):
    (old,) = ready(tmp_path, version=(3, 10, 4))
    assert "Python 3.10" in old and "3.11 to 3.13" in old
    (new,) = ready(tmp_path, version=(3, 14))
    assert "Python 3.14" in new
    (compiler,) = ready(tmp_path, compilers=["cc", "gcc"], which=lambda name: None)
    assert "cc, gcc" in compiler and "apt-get install gcc" in compiler
    (headers,) = ready(tmp_path, include=str(tmp_path / "nowhere"))
    assert "nowhere" in headers and "python3-dev" in headers
    (pip,) = ready(tmp_path, has_module=lambda name: name != "ensurepip")
    assert "python3-venv" in pip


def test_it_runs_with_the_standard_library_alone_and_fails_without_a_compiler(tmp_path):
    # A new environment holds no packages; an empty PATH holds no compiler.
    venv.create(tmp_path / "bare", with_pip=False)
    bare = tmp_path / "bare" / "bin" / "python"
    run = subprocess.run(
        [bare, "-m", "jaxrl.preflight"], cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True
    )
    assert run.returncode == 1 and "no C compiler" in run.stderr
    assert len(run.stderr.splitlines()) <= 3


def test_python_and_pyproject_agree():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.14"' in text
