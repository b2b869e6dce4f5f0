"""docs/loss.md keeps its word: its example runs, and its table names every divergence."""

import re
from pathlib import Path

from megatron_kd.loss.objective import DIVERGENCES

TEXT = (Path(__file__).parents[2] / "docs" / "loss.md").read_text()


def test_the_example_runs_and_gives_both_gradients():
    names = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.S)[1], names)  # noqa: S102 -- our own file
    assert names["student"].grad.abs().sum() > 0 and names["head"].grad.abs().sum() > 0


def test_every_divergence_is_in_the_table():
    assert set(re.findall(r"^\| `(\w+)` \| ", TEXT, re.M)) >= set(DIVERGENCES)
