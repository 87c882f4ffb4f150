"""The tree keeps the rules of the house, and each rule can fail."""

from pathlib import Path

import pytest

from tests import house

ROOT = Path(__file__).parents[1]
DOC = '"""A file."""\n'
LONG = "".join(f"    x{i} = {i}\n" for i in range(70))

# (rule, file, its text, words of the violation)
PLANTED = [
    ("floors", "jaxrl/kernels/a.py", "from jaxrl.batch import Batch\n", "kernels may not import"),
    ("floors", "jaxrl/model/a.py", "import jaxrl.algorithms.grpo\n", "model may not import"),
    ("floors", "jaxrl/model/a.py", "from jaxrl.kernels import groups\n", "model may not import"),
    (
        "floors",
        "jaxrl/algorithms/a.py",
        "def f():\n    from jaxrl import mesh\n",
        "algorithms may not",
    ),
    ("floors", "jaxrl/pool/a.py", "import jaxrl.tasks.contract\n", "pool may not import"),
    ("floors", "jaxrl/pool/a.py", "import_module('jaxrl.model.sampler')\n", "pool may not import"),
    ("floors", "jaxrl/train/a.py", "from jaxrl.launch import main\n", "train may not import"),
    ("floors", "jaxrl/train/a.py", "from . import step\n", "relative import"),
    ("floors", "jaxrl/launch.py", "from configs import base\n", "may not import configs"),
    ("third_parties", "jaxrl/train/a.py", "from flax import nnx\n", "flax is imported in model/"),
    ("third_parties", "jaxrl/model/a.py", "import optax\n", "optax is imported in train/"),
    (
        "third_parties",
        "jaxrl/train/a.py",
        "import orbax.checkpoint as ocp\n",
        "orbax is imported in",
    ),
    ("third_parties", "jaxrl/pool/a.py", "import jax\n", "host wing"),
    ("third_parties", "jaxrl/evaluate.py", "from jax import numpy\n", "host wing"),
    ("third_parties", "jaxrl/kernels/a.py", "import numpy as np\n", "not numpy"),
    ("slow_imports", "jaxrl/train/a.py", "from matplotlib import cm\n", "matplotlib.cm is slow"),
    ("dependencies", "jaxrl/a.py", "import requests\n", "requests is not among"),
    (
        "dependencies",
        "pyproject.toml",
        "[project]\ndependencies = ['jax>=1']\n",
        "jax is imported no",
    ),
    ("outside", "configs/a.py", "import jaxrl.batch\n", "configs import"),
    ("outside", "experiments/a.py", "from configs import gvpo\n", "a sweep imports nothing"),
    ("outside", "experiments/a.py", "from jaxrl import mesh\n", "a sweep imports nothing"),
    ("outside", "tests/papers/a.py", "import jax\n", "numpy alone"),
    ("sizes", "jaxrl/a.py", f"def f():\n{LONG}", "at most 60"),
    ("sizes", "jaxrl/kernels/a.py", f"def f():\n{LONG[:500]}", "at most 25"),
    ("sizes", "jaxrl/kernels/a.py", "x = 0\n" * 201, "at most 200"),
    ("sizes", "jaxrl/algorithms/a.py", "x = 0\n" * 121, "at most 120"),
    ("sizes", "tests/a.py", "x = 0\n" * 401, "at most 400"),
    ("tree_shape", "jaxrl/train/utils.py", "x = 0\n", "a drawer"),
    ("tree_shape", "jaxrl/common/a.py", "x = 0\n", "a drawer"),
    ("tree_shape", "jaxrl/train/deep/a.py", "x = 0\n", "flat"),
    ("tree_shape", "jaxrl/train/__init__.py", DOC + "x = 0\n", "nothing else"),
    ("tree_shape", "jaxrl/train/__init__.py", "", "holds a docstring"),
    ("tree_shape", "jaxrl/train/a.py", DOC + "import os\n", "an empty file"),
    ("no_stubs", "jaxrl/a.py", "def f():\n    pass\n", "a stub"),
    ("no_stubs", "jaxrl/a.py", "def f():\n    'Does something.'\n", "a stub"),
    ("no_stubs", "jaxrl/a.py", "def f():\n    raise NotImplementedError\n", "a stub"),
    ("docstrings", "jaxrl/a.py", DOC + "def f():\n    return 0\n", "f has no docstring"),
    (
        "docstrings",
        "jaxrl/a.py",
        f"{DOC}class C:\n    {DOC}    def f(self):\n        return 0\n",
        "f has no",
    ),
    ("docstrings", "jaxrl/a.py", "x = 0\n", "the file has no docstring"),
    (
        "no_defaults",
        "jaxrl/a.py",
        "x = config.optimizer.get('beta', 1)\n",
        "hides a missing config",
    ),
    (
        "no_defaults",
        "jaxrl/a.py",
        "x = self.model_config['a'].get('b')\n",
        "hides a missing config",
    ),
    ("no_defaults", "jaxrl/a.py", "x = getattr(y, 'maybe', None)\n", "hides a missing attribute"),
    ("no_defaults", "jaxrl/a.py", "class PoolConfig:\n    epochs: int = 0\n", "has a default"),
    (
        "no_defaults",
        "jaxrl/algorithms/a.py",
        "class Algorithm:\n    beta: float = 0.1\n",
        "has a default",
    ),
    (
        "kernel_form",
        "jaxrl/kernels/a.py",
        "def f(x, *, low=0.2):\n    return x\n",
        "a default argument",
    ),
    ("kernel_form", "jaxrl/kernels/a.py", "def f(x):\n    return x.mean()\n", "averages"),
    ("method_parts", "jaxrl/algorithms/a.py", DOC, "configs/a.py is missing"),
    ("method_parts", "jaxrl/algorithms/a.py", DOC, "tests/papers/a.py is missing"),
    ("method_parts", "jaxrl/algorithms/a.py", DOC, "tests/algorithms/test_a.py is missing"),
    ("method_parts", "jaxrl/algorithms/a.py", DOC, "README.md has no row"),
    ("no_loose_ends", "jaxrl/a.py", "x = 0  # TODO: later\n", "names no issue"),
]


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule):
    assert (ROOT / "jaxrl" / "batch.py").exists()
    violations = rule(ROOT)
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(
    ("name", "path", "text", "words"), PLANTED, ids=lambda value: str(value)[:24]
)
def test_a_planted_violation_is_found(name, path, text, words, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    rule = next(rule for rule in house.RULES if rule.__name__ == name)
    assert any(words in violation for violation in rule(tmp_path)), rule(tmp_path)


def test_every_rule_is_tried():
    assert {name for name, *_ in PLANTED} == {rule.__name__ for rule in house.RULES}


TEXT = '''"""Doc

of two lines."""

# comment
x = """a
b"""


def f():
    """Doc."""
    return (
        x  # why
    )
'''


def test_what_counts_as_code():
    assert house.code_lines(TEXT) == {6, 7, 10, 12, 13, 14}


PROTOCOL = (
    f"{DOC}from typing import Protocol\nclass P(Protocol):\n    {DOC}    def take(self): ...\n"
)
LOCAL = f"{DOC}class Local:\n    {DOC}    def take(self):\n        'Nothing is held.'\n"
ALLOWED = {
    "pyproject.toml": "[project]\ndependencies = ['flax[all]>=1', 'optax']\n",
    "jaxrl/pool/a.py": PROTOCOL,
    "jaxrl/pool/b.py": LOCAL,
    "jaxrl/model/a.py": f"{DOC}import flax\nfrom jaxrl.kernels.readings import entropy\nx = 0\n",
    "jaxrl/train/a.py": f"{DOC}# TODO: see #12\nimport optax\nx = getattr(y, 'a')\n",
    "jaxrl/train/b.py": f"{DOC}from jaxrl.pool.contract import Group\nx = header.get('kind')\n",
    "jaxrl/train/__init__.py": DOC,
    "experiments/a.py": f"{DOC}from jaxrl.sweep import grid\nBASE = 'configs/a.py'\n",
    "configs/a.py": f"{DOC}from configs import base\ndef get_config():\n    {DOC}{LONG}",
    "tests/kernels/cases.py": "x = 0\n" * 401,
}


def test_what_is_allowed_is_not_refused(tmp_path):
    for path, text in ALLOWED.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for rule in house.RULES:
        assert rule(tmp_path) == []
