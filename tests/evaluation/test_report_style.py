"""Contrast of the page's colours in both schemes, and how numbers are written."""

import importlib.resources
import re

import pytest

from he_keras.evaluation.report import page as page_parts
from he_keras.evaluation.report.page import NUM_SHADES, shade

TEMPLATES = importlib.resources.files("he_keras.evaluation.report").joinpath("templates")
STYLE = TEMPLATES.joinpath("style.css")
# Text may have these colours on these grounds.
PAIRS = [
    *[(text, "paper") for text in ("ink", "muted", "accent", "fail", "warn", "pass", "skipped")],
    *[(text, "panel") for text in ("ink", "accent")],
    *[(text, f"{ground}-ground") for ground in ("fail", "warn") for text in (ground, "muted")],
    *[("ink", f"{ground}-ground") for ground in ("fail", "warn", "pass")],
    *[("ink", f"shade-{level}") for level in range(NUM_SHADES)],
]


def colours(scheme):
    """The colour variables of a scheme; the dark one overrides some of the light one."""
    style = STYLE.read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.S)
    assert "prefers-color-scheme: dark" in style
    found = {}
    for block in blocks[: 1 if scheme == "light" else 2]:
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    return found


def luminance(colour):
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_defined():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme):
    palette = colours(scheme)
    low = {
        pair: contrast(palette[pair[0]], palette[pair[1]])
        for pair in PAIRS
        if contrast(palette[pair[0]], palette[pair[1]]) < 4.5
    }
    assert not low


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_neighbouring_shades_differ(scheme):
    palette = colours(scheme)
    steps = [
        contrast(palette[f"shade-{level}"], palette[f"shade-{level + 1}"])
        for level in range(NUM_SHADES - 1)
    ]
    assert min(steps) > 1.08


def test_every_colour_of_the_light_scheme_has_a_dark_one():
    light, dark = colours("light"), colours("dark")
    assert {name for name in light if light[name] == dark[name]} == set()
    assert len(light) >= 20


@pytest.mark.parametrize(
    ("strength", "level"),
    [(0, 0), (0.09, 0), (0.11, 1), (0.5, 2), (1, 5), (7, 5), (-1, 0), (None, 0)],
)
def test_shades_cover_the_range(strength, level):
    assert shade(strength) == f"shade-{level}"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (page_parts.percent(0.52614), "52.61%"),
        (page_parts.percent(1, 0), "100%"),
        (page_parts.percent(None), "–"),
        (page_parts.percent(float("nan")), "–"),
        (page_parts.percent(True), "–"),
        (page_parts.points(0.0731), "+7.31"),
        (page_parts.points(-0.0731), "−7.31"),
        (page_parts.interval([0.5, 0.625]), "50.00 to 62.50%"),
        (page_parts.interval([0.5, None]), "–"),
        (page_parts.interval(None), "–"),
        (page_parts.count(10000), "10,000"),
        (page_parts.passes(22.62), "22.6"),
        (page_parts.passes(4321.6), "4,322"),
        (page_parts.significant(-0.0313725), "−0.03137"),
        (page_parts.significant(float("inf")), "–"),
        (page_parts.duration(59.94), "59.9 s"),
        (page_parts.duration(59.96), "1 min 00 s"),
        (page_parts.duration(75), "1 min 15 s"),
        (page_parts.duration(3661), "1 h 01 min"),
        (page_parts.duration(7199.9), "2 h 00 min"),
        (page_parts.epsilon_in_pixels(8 / 255, [0.0, 1.0]), "8/255"),
        (page_parts.epsilon_in_pixels(8 / 255, [0, 255]), None),
        (page_parts.epsilon_in_pixels(0.03, [0, 1]), None),
        (page_parts.epsilon_in_pixels(0.0, [0, 1]), None),
        (page_parts.moment("2026-11-18T16:56:25+02:00"), "2026-11-18 14:56 UTC"),
        (page_parts.moment("2026-11-18T16:56:25"), "2026-11-18 16:56"),
        (page_parts.moment("yesterday"), "yesterday"),
        (page_parts.moment(None), None),
    ],
)
def test_numbers_are_written_as_people_read_them(shown, expected):
    assert shown == expected


def test_no_template_switches_escaping_off():
    templates = [file for file in TEMPLATES.iterdir() if file.name.endswith(".jinja")]
    assert len(templates) > 10
    for file in templates:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape|Markup", text), file.name
