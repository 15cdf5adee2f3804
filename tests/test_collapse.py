"""The pocket experiment: what its arms are, that zero mismatch is zero, and that its statistics say what they claim."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.collapse import loop, mechanism, pocket, records, report, sides, spec, task
from experiments.collapse.arms import ARMS, Arm
from experiments.collapse.spec import Run
from torch import Tensor
from transformers import PreTrainedModel

from tripoint.align import align
from tripoint.errors import MeasurementError, UsageError
from tripoint.rl.collapse import WINDOW, collapsed_at


@pytest.fixture(scope="module")
def weights() -> list[Tensor]:
    """Of a model that has learned nothing."""
    model = pocket.build("qwen2", torch.float32)
    pocket.initialise(model, key_size=100.0, seed=0)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROMPTS_PER_UPDATE", 3)


def trained(arm: str, weights: list[Tensor], updates: int = 2, **settings: Any) -> list[dict[str, Any]]:
    return list(loop.train(Run(arm, 0, 0, updates=updates, **settings), weights))


def loaded(model: PreTrainedModel, weights: list[Tensor]) -> PreTrainedModel:
    pocket.copy_weights(model, weights)
    return model


def trainer(arm: Arm, weights: list[Tensor]) -> PreTrainedModel:
    return loaded(sides.build_trainer(arm, "qwen2", torch.Generator().manual_seed(0)), weights)


def some_logits(model: PreTrainedModel, rows: int = 8) -> Tensor:
    prompts = task.training_prompts()[:rows]
    return loop.completion_logits(model, prompts, task.answers(prompts))


# -- zero means zero --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(pocket.SHAPES))
def test_aligned_trainer_gives_the_bits_of_decoding_with_a_cache(shape: str) -> None:
    # `train` raises if any update has a log-probability that differs; the gradient is the engine's own as well.
    model = pocket.build(shape, torch.float32)
    pocket.initialise(model, key_size=100.0, seed=1)
    done = trained("all", [parameter.detach() for parameter in model.parameters()], updates=3, shape=shape)
    assert [(r["max_abs"], r["k3"], r["ess"]) for r in done] == [(0.0, 0.0, 1.0)] * 3
    assert (done[0]["bias"], done[0]["bias_cosine"]) == (0.0, 0.0)


@pytest.mark.parametrize("arm", [name for name, arm in ARMS.items() if not arm.bitwise])
def test_every_other_arm_differs_from_its_engine(arm: str, weights: list[Tensor]) -> None:
    done = trained(arm, weights)
    assert all(r["max_abs"] > 0 and r["k3"] > 0 for r in done)
    assert done[0]["bias"] > 0


def test_a_mismatch_where_none_may_be_ends_the_run(weights: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_with_one_other_rounding(arm: Arm, shape: str) -> PreTrainedModel:
        model = pocket.build(shape, torch.bfloat16)
        align(model, "R3 S3 N3 N.final=N2")
        return model

    monkeypatch.setattr(sides, "build_engine", engine_with_one_other_rounding)
    with pytest.raises(MeasurementError, match=r"all_updates=2_sft0_seed0, update 0: max \|d\| is"):
        trained("all", weights)


# -- arms -------------------------------------------------------------------------------------------------------------


def rotated_of(arm: Arm, weights: list[Tensor], seed: int = 0) -> Tensor:
    attention = trainer(arm, weights).model.layers[0].self_attn.forward.__self__
    tables = torch.linspace(0, 3, 4 * 16).view(1, 4, 16).repeat(1, 1, 2)
    generator = torch.Generator().manual_seed(seed)
    query = (100 * torch.randn(3, 2, 4, 32, generator=generator)).bfloat16()
    return attention._rotate(None, query, query, tables.cos(), tables.sin())[0].double()


def test_placebo_moves_rotated_values_as_far_as_stock_does_in_both_directions(weights: list[Tensor]) -> None:
    arms = (ARMS["all"], Arm(trainer="R1 S3 N3"), ARMS["placebo"])
    aligned, stock, placebo = (rotated_of(arm, weights) for arm in arms)
    moved = placebo - aligned
    assert torch.equal(moved.abs(), (stock - aligned).abs())
    assert moved.count_nonzero() > 20
    assert (moved * (stock - aligned)).sign().unique().tolist() == [-1, 0, 1]


def test_fixed_placebo_moves_a_value_as_far_and_always_the_same_way(weights: list[Tensor]) -> None:
    directions = []
    for seed in (0, 1):
        arms = (ARMS["all"], Arm(trainer="R1 S3 N3"), ARMS["placebo-fixed"])
        aligned, stock, placebo = (rotated_of(arm, weights, seed) for arm in arms)
        assert torch.equal((placebo - aligned).abs(), (stock - aligned).abs())
        directions += list((placebo - aligned).sign())
    always = torch.stack(directions).sum(0).sign()
    assert all(torch.equal(direction, always * direction.abs()) for direction in directions)
    assert always.unique().tolist() == [-1, 0, 1]
    model = trainer(ARMS["placebo-fixed"], weights)
    assert torch.equal(some_logits(model), some_logits(model))


def test_noise_is_drawn_anew_and_leaves_the_gradient_alone(weights: list[Tensor]) -> None:
    model = trainer(ARMS["placebo"], weights)
    assert not torch.equal(some_logits(model), some_logits(model))
    here, there = torch.zeros(50, requires_grad=True), torch.ones(50)
    sides.moved(here, there, sides.random_signs(here.shape, torch.Generator().manual_seed(0))).sum().backward()
    assert here.grad is not None
    assert torch.equal(here.grad, torch.ones(50))


def test_a_dose_aligns_the_first_layers_only(weights: list[Tensor]) -> None:
    # A stock alignment of the upper layers changes nothing, so a dose of the stock schedule is the stock model.
    same = Arm(trainer="R1 S1 N1 carry=bf16", layers=2)
    assert torch.equal(some_logits(trainer(same, weights)), some_logits(trainer(ARMS["none"], weights)))

    def outputs(arm: Arm) -> list[Tensor]:
        """What each layer's attention gets to see: unlike the residual sum it is rounded in every arm."""
        model, seen = trainer(arm, weights), []
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_hook(lambda _module, _args, out: seen.append(out))
        some_logits(model)
        return seen

    aligned, half, untouched = outputs(ARMS["all"]), outputs(ARMS["dose-50"]), outputs(ARMS["none"])
    assert all(torch.equal(a, b) for a, b in zip(aligned[:2], half[:2], strict=True))
    assert not torch.equal(aligned[3], half[3])
    assert not torch.equal(untouched[1], half[1])


def test_split_arms_take_logits_from_one_side_and_the_gradient_from_the_other(weights: list[Tensor]) -> None:
    prompts = task.training_prompts()[:8]
    engine = loaded(sides.build_engine(Arm(), "qwen2"), weights)
    stock = trainer(Arm(), weights)
    noise = torch.Generator()
    for name, forward, backward in (("aligned-forward", engine, stock), ("aligned-backward", stock, engine)):
        logits, carrier = loop.policy_logits(ARMS[name], stock, engine, noise, prompts, task.answers(prompts))
        assert torch.equal(logits, some_logits(forward))
        assert carrier is backward
        expected = torch.autograd.grad(some_logits(backward).sum(), list(backward.parameters()))
        assert all(map(torch.equal, torch.autograd.grad(logits.sum(), list(carrier.parameters())), expected))


def test_samples_of_a_prompt_share_the_pass_over_it_without_a_bit_of_difference(weights: list[Tensor]) -> None:
    stock = trainer(ARMS["none"], weights)
    prompts = task.training_prompts()[:2]
    completions = task.answers(task.training_prompts()[:6])
    apart = loop.completion_logits(stock, prompts.repeat_interleave(3, dim=0), completions)
    assert torch.equal(loop.completion_logits(stock, prompts, completions), apart)


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_runs_repeat_and_differ_by_seed(weights: list[Tensor]) -> None:
    def trace(seed: int) -> list[float]:
        return [r["grad_norm"] for r in loop.train(Run("none", 0, seed, updates=2), weights)]

    assert trace(0) == trace(0)
    assert trace(0) != trace(1)


def test_sampling_follows_the_distribution_and_reports_its_own_probability(weights: list[Tensor]) -> None:
    engine = loaded(sides.build_engine(Arm(), "qwen2"), weights)
    prompts = task.training_prompts()[:1]
    uniform = torch.rand(task.LENGTH, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    completions, logprobs, _ = loop.sample(engine, prompts, uniform)
    first, counts = completions[:, 0].unique(return_counts=True)
    for token, count in zip(first, counts, strict=True):
        probability = logprobs[completions[:, 0] == token, 0].exp()[0].item()
        assert abs(count.item() / 512 - probability) < 4 * (probability / 512) ** 0.5


def test_advantages() -> None:
    rewards = torch.zeros(16, dtype=torch.float64)
    rewards[:2] = 1.0
    run = Run("none", 0, 0)
    assert loop.advantages(run, rewards).unique().tolist() == [-1.0, 0.0]
    assert loop.advantages(Run("none", 0, 0, baseline=0.5), rewards).unique().tolist() == [-0.5, 0.5]
    for baseline in spec.GROUP_BASELINES:
        grouped = loop.advantages(Run("none", 0, 0, baseline=baseline), rewards).view(2, 8)
        assert grouped[0, 0] > 0 > grouped[0, -1]
        assert grouped.sum(1).abs().max() < 1e-9
        assert not grouped[1].any()


def test_gradient_bias_is_relative_to_the_reference_and_knows_its_direction() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert loop.gradient_bias(reference * 1.5, reference) == pytest.approx({"bias": 0.5, "bias_cosine": 1.0})
    assert loop.gradient_bias(reference + torch.tensor([4.0, -3.0]), reference) == pytest.approx({"bias": 1, "bias_cosine": 0})


def test_only_the_right_order_is_rewarded() -> None:
    prompts = task.training_prompts()[:2]
    completions = task.answers(prompts)
    assert task.reward(prompts, completions).tolist() == [1, 1]
    completions[1, -1] = task.SEPARATOR
    assert task.reward(prompts, completions).tolist() == [1, 0]


def test_warm_up_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SFT_TARGET", 0.0)
    made = loop.warmed_up(Run("none", 3, 0), tmp_path)
    monkeypatch.setattr(loop, "_warm_up", lambda run: pytest.fail("made again"))
    again = loop.warmed_up(Run("all", 3, 7), tmp_path)
    assert all(map(torch.equal, made, again))


# -- runs on disk -----------------------------------------------------------------------------------------------------


def test_a_failed_run_loses_no_other_and_finished_runs_are_not_made_again(
    tmp_path: Path, weights: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "warmed_up", lambda run, directory: weights)
    monkeypatch.setattr(records, "ProcessPoolExecutor", _InThisProcess)
    good, bad = Run("none", 0, 0, updates=2), Run("none", 0, 1, updates=2, lr=-1.0)
    outcomes = {run: error for run, _, error in records.execute_all([bad, good], tmp_path, workers=1)}
    assert isinstance(outcomes[bad], ValueError)
    assert outcomes[good] is None
    assert records.missing([good, bad, good], tmp_path) == [bad]
    [(run, done)] = records.load(tmp_path)
    assert run == good
    assert [record["update"] for record in done] == [0, 1]


def test_a_run_that_was_cut_off_is_not_taken_for_finished(tmp_path: Path) -> None:
    run = Run("none", 0, 0)
    path = records.path_of(run, tmp_path)
    path.with_suffix(".unfinished").write_text(json.dumps({"run": run.to_dict()}) + "\n")
    assert records.missing([run], tmp_path) == [run]
    assert records.load(tmp_path) == []


def _slow(run: Run, directory: Path) -> None:
    (directory / run.name).touch()
    time.sleep(0.3)


def test_when_it_is_interrupted_no_other_run_begins(tmp_path: Path) -> None:
    made = records.execute_all([Run("none", 0, seed) for seed in range(12)], tmp_path, workers=1, what=_slow)
    next(made)
    made.close()
    assert 1 <= len(list(tmp_path.iterdir())) <= 4  # one is running, and the pool holds a few more ready


class _InThisProcess:
    """A pool of processes without the seconds that a process takes to import torch."""

    def __init__(self, workers: int, mp_context: object) -> None: ...

    def __enter__(self) -> _InThisProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, **_: bool) -> None: ...

    def submit(self, function: Any, *args: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def test_studies_are_balanced_over_arms_at_every_moment() -> None:
    quick = spec.studies()["quick"]
    assert len(quick) == 24
    assert [run.arm for run in quick[:4]] == ["none", "rope", "all", "placebo"]
    assert {(run.sft_seed, run.seed) for run in quick[:4]} == {(0, 0)}


def test_every_study_of_the_configuration_can_be_run() -> None:
    names = {run.name for study in spec.studies().values() for run in study}
    assert all(len(name) < 120 and "/" not in name for name in names)


def test_a_whole_number_is_the_same_setting_as_a_decimal_one() -> None:
    whole = Run("none", 0, 0, baseline=1, lr=1, key_size=10)
    assert whole == Run("none", 0, 0, baseline=1.0, lr=1.0, key_size=10.0)
    assert loop.advantages(whole, torch.zeros(16)).unique().tolist() == [-1.0]


def test_mistakes_in_a_configuration_are_named(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[study]\narm = ["nnoe"]\nseeds = [[0, 0]]\n')
    with pytest.raises(UsageError, match="unknown arm 'nnoe'; nearest: none"):
        spec.studies(config)
    config.write_text('[study]\narm = ["none"]\nbaseline = "grop"\nseeds = [[0, 0]]\n')
    with pytest.raises(UsageError, match="baseline='grop': give a number, mean or group"):
        spec.studies(config)
    config.write_text('[study]\narm = ["none"]\nlearning_rate = 1\nseeds = [[0, 0]]\n')
    with pytest.raises(UsageError, match=r"\[study\]: unknown setting 'learning_rate'"):
        spec.studies(config)


# -- what is said about them ------------------------------------------------------------------------------------------


def test_collapse_is_the_loss_of_half_of_the_best_reward() -> None:
    assert collapsed_at([0.4] * WINDOW + [0.21] * 200) is None
    fallen = collapsed_at([0.4] * WINDOW + [0.19] * 200)
    assert fallen == 2 * WINDOW - 3  # 0.4 * 2 + 0.19 * 48 < 0.2 * 50, but not with 0.4 * 3
    assert collapsed_at([0.0] * 300) is None
    assert collapsed_at([0.4] * (WINDOW - 1)) is None


def _finished(arm: str, final: float, sft_seed: int, seed: int, **settings: Any) -> tuple[Run, list[dict[str, Any]]]:
    run = Run(arm, sft_seed, seed, **settings)
    rewards = [0.35 + (final - 0.35) * min(1.0, i / 100) for i in range(200)]
    still = {"k3": 1e-3, "bias": 0.2, "bias_cosine": 0.1, "max_abs": 1.0, "entropy": 0.2, "seconds": 0.1}
    return run, [{"update": i, "reward": reward, **still} for i, reward in enumerate(rewards)]


def test_the_criterion_can_come_out_either_way(tmp_path: Path) -> None:
    pairs = [(sft_seed, seed) for sft_seed in range(5) for seed in range(2)]
    expected = {"none": 0.02, "rope": 0.6, "all": 0.7, "placebo": 0.6, "wrong": 0.01, "swapped": 0.02}
    expected |= {"placebo-fixed": 0.3, "all-but-rope": 0.02}
    longer = [_finished("none", 0.02, *pair, updates=1000) for pair in pairs]

    def report_of(finals: dict[str, float]) -> str:
        return report.write_report([_finished(arm, final, *pair) for arm, final in finals.items() for pair in pairs], tmp_path)

    assert report_of(expected).count("**holds**") == 8
    text = report_of(expected | {"placebo": 0.02, "wrong": 0.7, "all": 0.01})
    assert "| not the size of the mismatch | **fails** | placebo collapsed in 10 of 10 (72 to 100 %) |" in text
    assert "| same points, not more precision | **fails** | wrong collapsed in 0 of 10 (0 to 28 %) |" in text
    assert "| alignment cures | **fails** | all collapsed in 10 of 10 (72 to 100 %); all - none: -0.010 [" in text
    assert "over 10 pairs, above 0 for 0 of 5 warm-ups |" in text
    assert "| noise that does not average out harms | **fails** |" in text
    assert "stock collapses within 1000 updates | **holds** |" in report.write_report(longer, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"runs.csv", "curves.csv", "report.md", "curves.png"}


def test_a_claim_with_few_runs_or_none_is_not_judged(tmp_path: Path) -> None:
    text = report.write_report([_finished("none", 0.02, 0, 0), _finished("placebo-fixed", 0.1, 0, 0)], tmp_path)
    assert "| stock collapses | **too few runs** | none collapsed in 1 of 1 (21 to 100 %) |" in text
    assert "| noise that does not average out harms | **not run** | none that placebo has as well |" in text
    assert text.count("**not run**") == 8


def test_arms_are_paired_with_the_stock_trainer_of_their_setting(tmp_path: Path) -> None:
    usual = [_finished(arm, final, 0, seed) for arm, final in (("none", 0.1), ("all", 0.6)) for seed in range(2)]
    llama = [_finished("none", 0.5, 1, 0, shape="llama"), _finished("rope", 0.4, 1, 0, shape="llama")]
    unpaired = [_finished("all", 0.9, 2, 0), _finished("all", 0.9, 0, 0, lr=1e-3)]
    text = report.write_report([*usual, *llama, *unpaired], tmp_path)
    table = text.split("above 0 |\n")[1].splitlines()[1:]
    assert table == [
        "| all | 2 | 0 and 2 | +0.500 (+0.500 to +0.500) | +0.500 to +0.500 | 2 |",
        "| rope shape=llama | 1 | 0 and 0 | -0.100 (-0.100 to -0.100) | -0.100 to -0.100 | 0 |",
    ]


def test_mistral_without_a_window_computes_what_llama_does() -> None:
    logits = []
    for shape in ("llama", "mistral"):
        initialised = pocket.build(shape, torch.float32)
        pocket.initialise(initialised, key_size=100.0, seed=0)
        logits.append(some_logits(loaded(pocket.build(shape, torch.bfloat16), list(initialised.parameters()))))
    assert logits[0].equal(logits[1])


def test_the_interval_of_a_share() -> None:
    # As published for 15 of 148: R. G. Newcombe, Stat. Med. 17 (1998) 857, table I.
    assert report.share_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert report.share_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_mismatch_and_bias_are_those_before_a_run_has_changed() -> None:
    run, done = _finished("none", 0.02, 0, 0)
    for later in done[WINDOW:]:
        later |= {"k3": 1.0, "bias": 9.0}
    summary = report.summarise(run, done)
    assert (summary.k3, summary.bias) == (1e-3, 0.2)
    assert summary.lost_half


def test_a_run_that_diverged_is_counted_as_collapsed(weights: list[Tensor], tmp_path: Path) -> None:
    run = Run("all", 0, 0, updates=4 * WINDOW, lr=1e30)
    done = list(loop.train(run, weights))
    assert [record["update"] for record in done] == list(range(run.updates))
    assert done[-1]["diverged"]
    alive = [{**record, "reward": 0.4} for record in done[:1]] * 3 * WINDOW
    assert report.summarise(run, alive + done[-WINDOW:]).collapsed_at is not None
    assert "| all lr=1e+30 updates=200 | 1 |" in report.write_report([(run, done)], tmp_path)


def test_the_interval_knows_that_runs_of_one_warm_up_are_not_independent() -> None:
    one_warm_up_each = {(i, 0): float(i % 2) for i in range(20)}
    two_warm_ups = {(i % 2, i): float(i % 2) for i in range(20)}
    low, high = report.interval(one_warm_up_each)
    assert 0.2 < low < 0.5 < high < 0.8
    assert report.interval(two_warm_ups) == (0.0, 1.0)


def test_what_averages_out_is_not_systematic() -> None:
    generator = torch.Generator().manual_seed(0)
    steady = torch.zeros(1000, dtype=torch.float64)
    steady[0] = 5.0
    for expected in (torch.zeros_like(steady), steady):
        batches = expected + torch.randn(30, 1000, generator=generator, dtype=torch.float64)
        assert batches.square().sum(1).mean() > 900
        squared, stderr = mechanism.between_batches((batches @ batches.T).numpy())
        assert abs(squared - expected.square().sum().item()) < 3 * stderr < 12


def test_rank_correlation() -> None:
    x = np.array([1.0, 2.0, 3.0, 40.0])
    assert mechanism.rank_correlation(x, x**3) == pytest.approx(1)
    assert mechanism.rank_correlation(x, -x) == pytest.approx(-1)
    assert mechanism.rank_correlation(np.array([1.0, 1, 2, 2]), np.array([1.0, 2, 1, 2])) == pytest.approx(0)


def test_runs_of_a_condition_are_compared_with_each_other_only() -> None:
    # What tells conditions apart says nothing within one, and the reverse.
    condition_of = np.repeat([0, 1], 8)
    between = condition_of + np.tile([0.0, 0.1], 8)
    within = np.tile(np.arange(8.0), 2) - 100 * condition_of
    target = np.tile(np.arange(8.0), 2) + 100 * condition_of
    assert mechanism.rank_correlation(between, target) > 0.8
    assert mechanism.rank_correlation(within, target) < -0.4
    of_target = mechanism.ranks_within(target, condition_of)
    assert mechanism.rank_correlation(mechanism.ranks_within(within, condition_of), of_target) == pytest.approx(1)
    assert abs(mechanism.rank_correlation(mechanism.ranks_within(between, condition_of), of_target)) < 0.3
    assert mechanism.correlations_drawn(between, target, condition_of).min() < 0.5  # two conditions prove little


def _measured(run: Run, systematic2: float, directory: Path) -> None:
    path = mechanism.bias_path(run, directory)
    path.parent.mkdir(exist_ok=True)
    of_batches = {"batch2": 3.0, "bias2": 0.5, "gradient2": 0.2, "along": 0.0, "k3": 1e-3, "advantage": -0.65}
    path.write_text(json.dumps({"bias": of_batches | {"systematic2": systematic2, "systematic2_stderr": 0.1}}))


def test_the_mechanism_is_reported_with_what_predicts_the_loss(tmp_path: Path) -> None:
    finished = []
    for sft_seed in range(8):
        for arm, final, systematic2 in (
            ("none", 0.16 - sft_seed / 50, 0.1 + sft_seed / 10),
            ("rope", 0.5, 0.01),
            ("all", 0.6, 0),
        ):
            finished.append(_finished(arm, final, sft_seed, 0))
            _measured(finished[-1][0], systematic2, tmp_path)
    text = mechanism.mechanism_report(finished, tmp_path)
    assert "| none | 8 | 7 | +0.51 | 0.1500 | 0.001 | 3 | 0.2 | 0.5 | 0.45 ± 0.04 | 0 |" in text
    assert "| rope | 8 | 0 | +0.10 |" in text
    assert "| all |" not in text
    [primary] = [line for line in text.splitlines() if line.startswith(f"| {mechanism.PRIMARY} |")]
    assert primary.startswith(f"| {mechanism.PRIMARY} | +1.00 |")
    assert "| k3 | +0.00 | +0.00 to +0.00 | +" in text  # it leads k3
    assert "| +0.00 | +0.00 to +0.00 |\n| mean advantage |" in text


def test_a_loss_is_that_against_the_aligned_run_of_the_same_start(tmp_path: Path) -> None:
    for run in (Run("none", 0, 0), Run("none", 1, 0), Run("none", 0, 0, lr=1e-3), Run("none", 0, 0, updates=9)):
        _measured(run, 0.1, tmp_path)
    finished = [_finished("none", 0.2, 0, 0), _finished("all", 0.5, 0, 0), _finished("none", 0.2, 1, 0)]
    finished += [_finished(arm, 0.2, 0, 0, lr=1e-3) for arm in ("none", "all")]
    [case] = mechanism.cases(finished, tmp_path)
    assert case.run == Run("none", 0, 0)
    assert case.lost == pytest.approx(0.3)


@pytest.mark.parametrize("arm", ["aligned-forward", "aligned-backward", "placebo-logits", "placebo-fixed", "tis", "fp16"])
def test_the_bias_is_that_of_the_loss_an_arm_trains_with(
    arm: str, weights: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mechanism, "BATCHES", 3)
    measured, of_stock = (mechanism.measure(Run(name, 0, 0, baseline=0.5), weights) for name in (arm, "none"))
    assert 0 < measured["bias2"] < measured["batch2"]
    assert measured["bias2"] != of_stock["bias2"]
    assert (measured["k3"] == 0) == ARMS[arm].bitwise
    assert measured["advantage"] == -0.5  # a model that has learned nothing


def test_an_aligned_trainer_has_no_systematic_bias(weights: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "BATCHES", 4)
    aligned, stock = (mechanism.measure(Run(arm, 0, 0), weights) for arm in ("all", "none"))
    assert aligned["bias2"] == aligned["systematic2"] == aligned["along"] == 0
    assert stock["bias2"] > 0
    assert aligned["batch2"] == stock["batch2"] > 0
