"""The statistics of the checks: closed forms, and how often they call what is not there.

Samples are simulated with fixed seeds, or summed up exactly over all that can happen.
"""

import pathlib
import re
import types

import numpy as np
import pytest
import scipy.stats

from he_keras.evaluation.checks import radii, strength
from he_keras.evaluation.checks.check import Wording, paired_outcome, surplus_outcome
from he_keras.evaluation.statistics import (
    CHANCE_LEVEL,
    POWER,
    Pair,
    chance_of_at_least,
    exceeds,
    fewest_beyond,
    fewest_gains,
    found_excess,
    found_share,
    mean_exceeds,
    resolution,
)

WORDS = Wording("figure", "good", "bad")
SAMPLES = 1000


@pytest.mark.parametrize("total", [1, 16, 64, 1000])
@pytest.mark.parametrize("share", [0.005, 0.05, 0.9])
def test_tails_of_the_binomial_distribution(total, share):
    for count in {0, 1, 2, total // 2, total}:
        expected = scipy.stats.binom.sf(count - 1, total, share)
        assert chance_of_at_least(count, total, share) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("total", [1, 16, 64, 1000])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 0.5, 1.0])
def test_the_fewest_that_exceed_a_share(total, share):
    """The smallest count that a test of scipy calls more than the share."""
    tail = scipy.stats.binom.sf(np.arange(total + 1) - 1, total, share)
    called = np.flatnonzero((tail < CHANCE_LEVEL) & (np.arange(total + 1) > share * total))
    assert fewest_beyond(total, share) == (called[0] if len(called) else total + 1)


def test_single_examples_do_not_exceed_a_threshold():
    assert not exceeds(1, 64, 0.005) and exceeds(2, 64, 0.005)
    assert not exceeds(2, 64, 0.01) and exceeds(3, 64, 0.01)
    assert exceeds(1, 64, 0.0) and not exceeds(0, 64, 0.0) and not exceeds(-3, 64, 0.0)
    assert not exceeds(64, 64, 1.0)


@pytest.mark.parametrize(("gains", "losses"), [(0, 0), (5, 0), (8, 3), (3, 8), (30, 20)])
def test_pairs_are_compared_by_the_exact_sign_test(gains, losses):
    pair = Pair(gains, losses, 100)
    if gains + losses:
        expected = scipy.stats.binomtest(gains, gains + losses, alternative="greater").pvalue
        assert pair.chance == pytest.approx(expected)
    else:
        assert pair.chance == 1.0


def test_a_net_gain_of_noise_is_no_gain():
    """Ten of 64 more on one side and six on the other: four net, which were 6 points and a FAIL."""
    assert exceeds(10 - 6, 64, 0.005)
    assert not Pair(10, 6, 64).exceeds(0.005)
    assert Pair(10, 1, 64).exceeds(0.005)


@pytest.mark.parametrize("total", [16, 64])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_two_equal_attacks_are_rarely_told_apart(total, share):
    """Exact: as many examples as the share of disagreement gives, each to either side by a coin."""
    called = 0.0
    for number in range(total + 1):
        gains = number + 1
        while gains and Pair(gains - 1, number - gains + 1, total).exceeds(0.005):
            gains -= 1
        if gains <= number:
            weight = scipy.stats.binom.pmf(number, total, share)
            called += weight * scipy.stats.binom.sf(gains - 1, number, 0.5)
    assert called <= CHANCE_LEVEL


@pytest.mark.parametrize("tries", [1, 2, 4])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_the_best_of_several_equal_attacks_is_rarely_called(tries, noise):
    """The rule before, the largest net gain of four, called a third of these samples and more."""
    random = np.random.default_rng(tries)
    flips = random.uniform(size=(SAMPLES, tries + 1, 64)) < noise
    masks = (random.uniform(size=(SAMPLES, 1, 64)) < 0.5) ^ flips
    called = net = 0
    for first, *others in masks:
        pairs = [Pair.of(first, each) for each in others]
        called += paired_outcome(pairs, 64, 0.005, WORDS).fired
        net += exceeds(max(pair.gains - pair.losses for pair in pairs), 64, 0.005)
    assert called <= 1.3 * CHANCE_LEVEL * SAMPLES
    assert net > 0.15 * SAMPLES


@pytest.mark.parametrize("share", [0.002, 0.005, 0.01, 0.05])
@pytest.mark.parametrize("total", [32, 64, 500])
def test_a_share_that_does_not_matter_is_rarely_called(share, total):
    called = chance_of_at_least(fewest_beyond(total, share), total, share)
    assert called < CHANCE_LEVEL


@pytest.mark.parametrize("total", [16, 64, 1000])
@pytest.mark.parametrize("tries", [0, 1, 4])
def test_what_is_resolved_is_found_four_times_in_five(total, tries):
    """`tries` 0: a count without anything against it; the text says the very figure."""
    if tries:
        needed = fewest_gains(total, 0.005, CHANCE_LEVEL / tries)
        check = paired_outcome([Pair(0, 0, total)] * tries, total, 0.005, WORDS)
    else:
        needed = fewest_beyond(total, 0.005)
        check = surplus_outcome(0, total, total, 0.005, WORDS)
    stated = float(re.search(r"less than ([\d.]+) points", check.resolution)[1]) / 100
    assert stated == pytest.approx(found_share(needed, total), abs=0.0006)
    random = np.random.default_rng(total)
    found = 0
    for gained in random.uniform(size=(SAMPLES, total)) < stated + 0.0005:
        pairs = [Pair(0, 0, total)] * (tries - 1) + [Pair(int(gained.sum()), 0, total)]
        if tries:
            found += paired_outcome(pairs, total, 0.005, WORDS).fired
        else:
            found += surplus_outcome(int(gained.sum()), total, total, 0.005, WORDS).fired
    assert (POWER - 0.04) * SAMPLES < found < (POWER + 0.06) * SAMPLES


def test_closed_forms_of_what_is_resolved():
    assert found_share(1, 64) == pytest.approx(1 - 0.2 ** (1 / 64))
    assert found_share(64, 64) == pytest.approx(0.8 ** (1 / 64))
    assert found_share(65, 64) is None
    assert fewest_gains(64, 0.01) == 5 and 0.5**5 < CHANCE_LEVEL < 0.5**4
    assert "4.6 points" in resolution(2, 64) and "too few" in resolution(5, 4)


def test_a_check_that_cannot_fire_says_so():
    """All of the four that are left could be found, and it would still be chance."""
    check = paired_outcome([Pair(4, 0, 64)], 4, 0.005, WORDS)
    assert check.verdict == "skipped" and "Only 4 of 64" in check.message
    assert surplus_outcome(1, 1, 64, 0.005, WORDS).verdict == "skipped"
    assert surplus_outcome(2, 2, 64, 0.005, WORDS).verdict == "warn"


@pytest.mark.parametrize("size", [5, 32])
def test_means_of_late_shares_are_rarely_called(size):
    """Skewed as the real ones are: most are 0, some large, the mean at the threshold."""
    random = np.random.default_rng(size)
    values = random.beta(0.2, 3.8, size=(SAMPLES, size))
    called = sum(mean_exceeds(each, 0.05) for each in values)
    assert called <= 1.3 * CHANCE_LEVEL * SAMPLES
    # Without a test of the mean, the threshold alone calls four of ten.
    assert (values.mean(axis=1) > 0.05).sum() > 0.3 * SAMPLES


@pytest.mark.parametrize("size", [5, 32])
def test_means_that_are_resolved_are_found_four_times_in_five(size):
    spread = np.random.default_rng(size).normal(size=(SAMPLES, size))
    excess = np.median([found_excess(each) for each in spread])
    found = sum(mean_exceeds(each + excess, 0.0) for each in spread)
    assert POWER - 0.05 < found / SAMPLES < POWER + 0.15


def stub(plain, **others):
    """What the checks of strength ask of a sample, without any attack."""
    plain = np.asarray(plain, bool)
    fields = {"plain": plain, "num_steps": 20, "run": lambda attack: attack}
    # What is measured once, here without an attack: the result of the longer one.
    fields |= {"once": lambda function: types.SimpleNamespace(success=others["build"]())}
    fields |= others
    return types.SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("gains", "losses", "verdict"),
    [(0, 0, "pass"), (4, 0, "pass"), (5, 0, "warn"), (10, 6, "pass"), (12, 2, "fail")],
)
def test_more_steps_and_one_step_are_judged_by_who_broke_what(gains, losses, verdict):
    plain = np.arange(64) < 20
    other = plain.copy()
    other[:losses] = False
    other[20 : 20 + gains] = True
    sample = stub(plain, build=lambda *_, **__: other)
    longer, single = strength.more_steps(sample), strength.single_step(sample)
    assert longer.verdict == single.verdict == verdict
    assert longer.figure == f"{gains} of 64 broken by 40 steps only, {losses} by 20 only"
    assert "less than 10.3 points" in longer.resolution


class StubOfSixty:
    """A sample whose attacks break what they are told to, in turn."""

    logits, labels = np.eye(2)[np.zeros(60, int)], np.zeros(60, int)
    threat = types.SimpleNamespace(norm="linf", bounds=(0.0, 1.0))
    num_steps = 20

    def __init__(self, masks):
        self.masks = list(masks)

    def __len__(self):
        return 60

    def ascent(self, threat):
        return types.SimpleNamespace(name="pgd")

    def run(self, attack):
        return self.masks.pop(0)


def test_examples_that_a_larger_radius_leaves_show_behind_others_that_fall():
    """Four come back at each radius and six fall: the accuracy falls all the way."""
    masks = [np.arange(60) < 10, (np.arange(60) >= 4) & (np.arange(60) < 16)]
    masks.append((np.arange(60) >= 8) & (np.arange(60) < 24))
    sample = StubOfSixty(masks)
    curve = sample.curve = radii.measured_curve(sample, None, [0.1, 0.2, 0.4])
    accuracies = [point["accuracy"] for point in curve["points"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert curve["num_regained"] == 8
    check = radii.monotone_in_epsilon(sample)
    assert check.verdict == "fail" and "8 of 60 broken at one radius" in check.figure


def test_a_curve_without_examples_is_not_judged():
    points = [{"epsilon": 0.1, "accuracy": 0.5}]
    curve = {"attack": "pgd", "num_examples": 64, "points": points}
    sample = types.SimpleNamespace(curve=curve)
    assert radii.monotone_in_epsilon(sample).verdict == "skipped"


def test_the_documentation_gives_what_64_images_resolve():
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs/reference/checks.md").read_text()
    table = text.partition("| kind of check, 64 images |")[2].partition("\n\n")[0]
    rows = [
        (int(needed), float(size))
        for needed, size in re.findall(r"\| (\d+) \| ([\d.]+) points \|", table)
    ]
    needed = [fewest_gains(64, 0.01, CHANCE_LEVEL / tries) for tries in (1, 2)]
    needed += [fewest_beyond(64, 0.005), 1]
    assert fewest_beyond(64, 0.002) == fewest_beyond(64, 0.005)
    assert rows == [(each, round(100 * found_share(each, 64), 1)) for each in needed]
    stated = {float(each) for each in re.findall(r"64 images resolve (\d+\.\d)", text)}
    assert stated == {size for _, size in rows}
    assert f"32 images resolve {100 * found_share(1, 32):.1f}" in text
    resolved = (found_share(fewest_gains(n, 0.01, CHANCE_LEVEL / 2), n) for n in range(64, 200))
    sizes = [n for n, share in enumerate(resolved, 64) if share and share <= 0.07]
    assert f"A gap of 7 points takes {sizes[0]}." in text
