"""--shrink and --data are expanded before a command sees its arguments."""

from pathlib import Path

import pytest

from megatron_kd.cli.shorthands import expand
from megatron_kd.config.load import load
from megatron_kd.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_data_becomes_two_overrides_after_the_recipe():
    assert expand(["train", "r.yaml", "--data", "texts", "train.iters=3"]) == ["train", "r.yaml", "train.iters=3", "data.kind=text", "data.text=texts"]


def test_shrink_replaces_the_recipe_by_its_small_twin_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["train", str(ROOT / "recipes/qwen35_397b_35b_streamed.yaml"), "--shrink", "train.lr=1e-2"]
    command, path, override = expand(argv)
    assert (command, override) == ("train", "train.lr=1e-2") and "dropped: student ep=8 -> 2" in capsys.readouterr().err
    recipe = load(path, [override])
    assert recipe.device == "cpu" and recipe.teacher.placement == "streamed" and recipe.student.layout.ep == recipe.teacher.layout.ep == 2
    config = Path(recipe.student.model) / "config.json"
    made_ns = config.stat().st_mtime_ns
    assert expand(argv)[1] == path and config.stat().st_mtime_ns == made_ns


@pytest.mark.parametrize("argv", [["train", "--shrink"], ["train", "r.yaml", "--data"]])
def test_a_shorthand_without_its_object_is_refused(argv):
    with pytest.raises(ConfigError):
        expand(argv)
