"""The Triton row kernels against their torch twins in Triton's interpreter. Needs no GPU."""

import pytest

from tests.harness import RankPool

ODD = {"num_rows": 5, "num_columns": 5003, "num_true": 4999}
"""More than one block of columns, none full at the end, a padding column, odd strides."""
NARROW = {"num_rows": 4, "num_columns": 130, "num_true": 97, "teacher_columns": 100}
"""Less than one block; teacher's shard narrower than the student's."""
TRANSFORMS = {"student": {"scale": 0.5, "softcap": 4.0}, "teacher": {"scale": -1.3}}


@pytest.fixture(scope="module")
def interpreted():
    """One process in which Triton interprets."""
    pool = RankPool("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield pool
    pool.close()


def compare(rank, world, *, divergence, dtype, window, temperature=1.0, transforms=None, ce_coef=0.7, with_labels=True):
    import torch

    import tests.unit.triton_interpreter  # noqa: F401
    from megatron_kd.kernels import torch_twin, triton_rows
    from megatron_kd.kernels.spec import HeadTransform
    from tests.unit import kernel_cases as cases

    transforms = {side: HeadTransform(**values) for side, values in (transforms or {}).items()}
    spec = cases.make_spec(divergence, window["num_true"], temperature=temperature, ce_coef=ce_coef, **transforms)
    student_RV, teacher_RV, labels_R, weights_R = cases.make_window(**window, dtype=getattr(torch, dtype))
    inputs = (student_RV, teacher_RV, labels_R if with_labels else None, weights_R)
    exact_inputs = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    exact = cases.chain(torch_twin, *exact_inputs, spec)
    twin, got = (cases.chain(kernels, *inputs, spec, joined_with=exact["joined"]) for kernels in (torch_twin, triton_rows))
    pad = got["grad"][:, window["num_true"]:]
    assert (pad == 0).all(), "padding columns must get gradient 0"
    assert (got["grad"][3] == 0).all(), "a row with weight 0 must get gradient 0"
    tails = [cases.tail_chain(torch_twin, exact_inputs[0], exact_inputs[3], spec)]
    tails += [cases.tail_chain(kernels, student_RV, weights_R, spec) for kernels in (torch_twin, triton_rows)]
    return cases.worst_error(got, twin, exact) or cases.worst_error(tails[2], tails[1], tails[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"])
def test_every_divergence_equals_its_twin_at_odd_sizes(interpreted, divergence, dtype):
    assert interpreted.run(compare, 1, divergence=divergence, dtype=dtype, window=ODD) == [None]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_temperature_scale_and_softcap_of_both_heads_equal_the_twin(interpreted, divergence):
    assert interpreted.run(compare, 1, divergence=divergence, dtype="float32", window=NARROW, temperature=2.5, transforms=TRANSFORMS) == [None]


@pytest.mark.parametrize("with_labels, ce_coef", [(False, 0.7), (True, 0.0)], ids=["no labels", "no cross-entropy"])
def test_without_cross_entropy_the_gradient_is_the_divergence_alone(interpreted, with_labels, ce_coef):
    assert interpreted.run(compare, 1, divergence="forward_kl", dtype="bfloat16", window=NARROW, with_labels=with_labels, ce_coef=ce_coef) == [None]


def test_a_shard_without_a_true_column_has_empty_statistics_and_gradient_zero(interpreted):
    window = {"num_rows": 4, "num_columns": 64, "num_true": 0}
    assert interpreted.run(compare, 1, divergence="forward_kl", dtype="bfloat16", window=window) == [None]


def zero_probabilities(rank, world):
    import torch

    import tests.unit.triton_interpreter  # noqa: F401
    from megatron_kd.kernels import torch_twin, triton_rows
    from tests.unit import kernel_cases as cases

    student_RV, teacher_RV, labels_R, weights_R = cases.make_window(5, 64, 60, dtype=torch.float32)
    teacher_RV[:, 5:50] = float("-inf")
    teacher_RV[2, :60] = torch.nan
    problems = []
    for divergence in ("forward_kl", "jsd", "skew_forward_kl"):
        spec = cases.make_spec(divergence, 60)
        inputs = (student_RV, teacher_RV, labels_R, weights_R)
        exact = cases.chain(torch_twin, *(x.double() if x.is_floating_point() else x for x in inputs), spec)
        twin, got = (cases.chain(kernels, *inputs, spec, joined_with=exact["joined"]) for kernels in (torch_twin, triton_rows))
        assert torch.isfinite(got["joined"][[0, 1, 3, 4], :5]).all(), "a token of probability 0 is a term of value 0"
        assert not torch.isfinite(got["joined"][2, 1]), "a teacher row of NaN must be seen in its log-sum-exp"
        for outputs in (exact, twin, got):
            outputs["stats"][2] = 0.0  # only the joined log-sum-exp has to show the NaN
        problems.append(cases.worst_error(got, twin, exact))
    return problems


def test_teacher_probability_zero_adds_nothing_and_nan_is_seen(interpreted):
    assert interpreted.run(zero_probabilities, 1) == [[None] * 3]


def compare_top_k(rank, world, *, divergence, mode, dtype="float32", window=NARROW, num_kept=21, transforms=None, with_labels=True, kd_coef=0.9):
    from dataclasses import replace

    import torch

    import tests.unit.triton_interpreter  # noqa: F401
    from megatron_kd.kernels import triton_rows
    from megatron_kd.kernels.spec import HeadTransform
    from tests.unit import kernel_cases as cases

    transforms = {side: HeadTransform(**values) for side, values in (transforms or {}).items()}
    spec = replace(cases.make_spec(divergence, window["num_true"], temperature=2.5 if mode == "renormalise" else 1.0, **transforms), kd_coef=kd_coef)
    student_RV, teacher_RV, labels_R, weights_R = cases.make_window(**window, dtype=getattr(torch, dtype))
    targets = cases.make_top_k(window["num_rows"], window["num_true"], num_kept)
    return cases.top_k_error(triton_rows, (student_RV, teacher_RV, labels_R if with_labels else None, weights_R), targets, mode, spec)


@pytest.mark.parametrize("mode", ["tail_bucket", "renormalise", "none"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "total_variation"])
def test_top_k_of_every_mode_equals_its_twin(interpreted, divergence, mode):
    assert interpreted.run(compare_top_k, 1, divergence=divergence, mode=mode) == [None]


@pytest.mark.parametrize("case", [
    {"dtype": "bfloat16", "window": ODD, "num_kept": 100},
    {"transforms": TRANSFORMS},
    {"with_labels": False},
    {"num_kept": 0, "kd_coef": 0.0},
    {"window": {"num_rows": 4, "num_columns": 64, "num_true": 0}, "num_kept": 5},
], ids=["K=100 in bf16", "softcap", "no labels", "labels alone", "no true column"])
def test_top_k_edge_equals_its_twin(interpreted, case):
    assert interpreted.run(compare_top_k, 1, **{"divergence": "forward_kl", "mode": "tail_bucket", **case}) == [None]


def scale_error(rank, world, *, source, target):
    import torch

    import tests.unit.triton_interpreter  # noqa: F401
    from megatron_kd.kernels.triton_scale import scale

    torch.manual_seed(0)
    x, c = torch.randn(57, 211).to(getattr(torch, source)), torch.tensor(0.37)
    out = scale(x, c, torch.full(x.shape, float("nan"), dtype=getattr(torch, target)))
    return ((out.double() - x.double() * c.double()).abs() / x.double().abs().clamp_min(1e-9)).max().item() / torch.finfo(out.dtype).eps  # an exact 0 stays 0


@pytest.mark.parametrize("source, target", [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_scaled_is_within_one_rounding(interpreted, source, target):
    """The interpreter truncates to bfloat16, a GPU rounds (tests/gpu): one ulp here."""
    assert interpreted.run(scale_error, 1, source=source, target=target)[0] <= 1.0
