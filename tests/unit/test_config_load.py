"""Recipes: loading, overrides, and errors that name the key, the value, the rule and the way out."""

import subprocess
import sys

import pytest
import yaml

from megatron_kd.config.load import build, load, to_yaml
from megatron_kd.config.schema import LayoutConfig, LossConfig
from megatron_kd.errors import ConfigError, UnsupportedLayout

BASE = {"name": "x", "output_dir": "out/${name}", "student": {"model": "s"}, "teacher": {"model": "t"}, "train": {"iters": 3, "global_batch": 8}}


def test_defaults_fill_what_is_not_given_and_references_resolve():
    recipe = build(BASE)
    assert (recipe.output_dir, recipe.device, recipe.teacher.placement, recipe.loss.kd_weight, recipe.student.layout.tp) == (
        "out/x",
        "cuda",
        "colocated",
        1.0,
        1,
    )


def test_overrides_apply_in_order_and_follow_yaml_types():
    recipe = build(
        BASE,
        [
            "train.lr=1e-3",
            "train.lr=2e-3",
            "student.layout.tp=2",
            "data.paths=[0.3, a, 0.7, b]",
            "data.kind=gpt",
            "loss.window_rows=null",
            "train.save=false",
        ],
    )
    assert (recipe.train.lr, recipe.student.layout.tp, recipe.data.paths, recipe.loss.window_rows, recipe.train.save) == (
        2e-3,
        2,
        ["0.3", "a", "0.7", "b"],
        None,
        False,
    )


def test_bridge_overrides_are_dotted_paths_however_they_are_written():
    recipe = build(
        BASE | {"bridge": {"model.moe_aux_loss_coeff": 0.1, "optimizer": {"adam_eps": 1e-5}}},
        ["bridge.model.mtp_num_layers=null", "bridge.ddp.bucket_size=1000"],
    )
    assert recipe.bridge == {"model.moe_aux_loss_coeff": 0.1, "optimizer.adam_eps": 1e-5, "model.mtp_num_layers": None, "ddp.bucket_size": 1000}


def test_written_recipe_loads_to_an_equal_one(tmp_path):
    recipe = build(BASE, ["student.init=pruned", "student.prune.keep_layers=[0,3]", "loss.hidden_term.kind=mse", "bridge.model.a=[1,2]"])
    (tmp_path / "r.yaml").write_text(to_yaml(recipe))
    assert load(tmp_path / "r.yaml") == recipe


@pytest.mark.parametrize(
    "override, nearest",
    [
        ("train.lrr=3", "train.lr."),
        ("loss.window_row=3", "loss.window_rows."),
        ("los.kd_weight=1", "loss."),
        ("kd_weight=1", "loss.kd_weight."),
        ("student.layout.tensor=2", "student.layout."),
        ("stream.ring_deph=3", "stream.ring_depth."),
        ("teacher.layout.sequence_paralel=true", "teacher.layout.sequence_parallel."),
    ],
)
def test_unknown_key_is_an_error_that_names_the_nearest_one(override, nearest):
    with pytest.raises(ConfigError, match="has no such key") as error:
        build(BASE, [override])
    assert nearest.rstrip(".") in str(error.value).split("Did you mean ")[1]


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.lr=abc", ["train.lr", "'abc'", "Float"]),
        ("loss.divergence=fwd_kl", ["loss.divergence", "'fwd_kl'", "forward_kl", "total_variation"]),
        ("student.layout.tp=2.5", ["student.layout.tp", "2.5", "Integer"]),
        ("student=3", ["student", "3", "section", "layout"]),
        ("train=null", ["train", "None"]),
        ("train.global_batch=0", ["global_batch", "0", "above 0"]),
        ("loss.beta=1.5", ["loss.beta", "1.5", "between 0 and 1"]),
        ("loss.skew=1.0", ["loss.skew", "below 1"]),
        ("stream.ring_depth=1", ["ring_depth", "at least 2"]),
        ("data.kind=text", ["data.text", "data.kind=text"]),
        ("data.held_out=1.0", ["data.held_out", "1.0"]),
        ("student.init=pruned", ["student.init", "prune"]),
        ("student.prune.num_layers=4", ["student.init", "prune"]),
        ("output_dir=${nope}/x", ["output_dir", "nope"]),
        ("train.lr", ["train.lr", "key=value"]),
    ],
)
def test_bad_value_is_an_error_that_names_key_value_and_rule(override, words):
    with pytest.raises(ConfigError) as error:
        build(BASE, [override])
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "overrides, kind, words",
    [
        (
            ["student.layout.tp=3", "student.layout.sequence_parallel=true", "data.seq_length=512"],
            UnsupportedLayout,
            ["data.seq_length", "512", "tp = 3", "510"],
        ),
        (["student.layout.cp=2", "data.seq_length=514"], UnsupportedLayout, ["data.seq_length", "multiple of 2 x"]),
        (["device=cpu", "student.layout.cp=2"], UnsupportedLayout, ["student.layout.cp", "CPU"]),
        (["device=cpu", "data.kind=sft", "data.sft_dir=d", "data.packed=true"], UnsupportedLayout, ["data.packed", "CPU"]),
        (["student.layout.sequence_parallel=true"], UnsupportedLayout, ["sequence_parallel", "tp > 1"]),
        (["student.layout.vpp=2"], UnsupportedLayout, ["vpp", "pp > 1"]),
        (["loss.kd_weight=0"], ConfigError, ["kd_weight", "nothing is learned"]),
        (["teacher.layout.tp=2"], ConfigError, ["teacher.layout", "colocated"]),
        (["teacher.placement=cached", "loss.hidden_term.kind=cosine"], ConfigError, ["loss.hidden_term", "hidden states"]),
        (["teacher.placement=cached", "cache.selection=sampled", "loss.divergence=jsd"], ConfigError, ["cache.selection", "forward KL alone"]),
        (["teacher.placement=cached", "loss.temperature=2.0"], ConfigError, ["loss.temperature", "renormalise"]),
        (["teacher.placement=streamed", "stream.on_teacher_loss=ce_only"], ConfigError, ["ce_only", "ce_weight"]),
        (["teacher.placement=streamed", "teacher.context_length=1024"], ConfigError, ["teacher.context_length", "1024", "2048"]),
        (["teacher.placement=streamed", "teacher.layout.tp=2", "teacher.world_size=3"], UnsupportedLayout, ["teacher.world_size", "3"]),
        (["train.eval_interval=5"], ConfigError, ["train.eval_iters", "eval_interval"]),
        (["train.warmup_iters=3"], ConfigError, ["warmup_iters", "train.iters"]),
        (["train.micro_batch=3"], ConfigError, ["train.global_batch", "8", "3"]),
        (["train.overlap_param_gather=true"], ConfigError, ["overlap_param_gather", "distributed"]),
    ],
)
def test_combination_that_cannot_be_right_is_refused_before_anything_starts(overrides, kind, words):
    with pytest.raises(kind) as error:
        build(BASE, overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "text, words", [("a: [1", ["not YAML"]), ("- 1", ["must be a mapping"]), ("name: x", ["no default", "output_dir", "student"])]
)
def test_file_that_is_no_recipe_says_so(tmp_path, text, words):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "r.yaml")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_missing_file_is_named():
    with pytest.raises(ConfigError, match="nowhere.yaml.*cannot be read"):
        load("nowhere.yaml")


def test_layout_says_how_many_ranks_the_experts_need():
    assert (
        LayoutConfig(tp=2, ep=4, etp=1).min_world == 4
        and LayoutConfig(tp=2, ep=4).min_world == 8
        and LayoutConfig(tp=2, pp=2, ep=2, etp=1).min_world == 4
    )
    assert LayoutConfig(tp=2, pp=2).for_world(8).dp == 2


@pytest.mark.parametrize(
    "schedule, step, expected",
    [
        ("constant", 5, (1.0, 0.2)),
        ("linear", 0, (1.0, 0.2)),
        ("linear", 5, (0.5, 0.6)),
        ("linear", 99, (0.0, 1.0)),
        ("cosine", 5, (0.5, 0.6)),
        ("cosine", 10, (0.0, 1.0)),
    ],
)
def test_loss_weights_move_to_their_ends_over_the_schedule(schedule, step, expected):
    ends = {} if schedule == "constant" else {"kd_weight_end": 0.0, "ce_weight_end": 1.0}
    assert LossConfig(kd_weight=1.0, ce_weight=0.2, schedule=schedule, **ends).weights_at(step, train_iters=10) == pytest.approx(expected)


def test_config_loads_with_torch_blocked():
    code = f"import sys; sys.modules['torch'] = None; from megatron_kd.config.load import build; print(build({BASE!r}).name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "x", done.stderr


def test_shipped_recipes_load():
    from pathlib import Path

    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        assert load(path).name, path
        assert yaml.safe_load(path.read_text())
