"""What `help(he.attacks.<Name>)` says of every registered attack: five labels, in one order.

`make test` collects the docstrings of the package, and so runs the examples themselves. Here it is
checked that there is one to collect, for every attack.
"""

import doctest
import inspect
import pathlib
import re

import pytest
from registered_attacks import base_name

import he_keras
from he_keras import attacks
from he_keras.attacks import registry

LABELS = ("Paper", "Assumes", "Cost", "Deviations", "Example")
#: Where the text of a label ends, other than at the next label.
OTHER_SECTIONS = ("Args",)
FEWEST_WORDS = 3
YEAR = re.compile(r"\b(19|20)\d\d\b")
MAKEFILE = pathlib.Path(__file__).parents[2] / "Makefile"


def labelled_parts(docstring):
    """The labels at the beginnings of lines, in order, each with the text up to the next one."""
    pattern = rf"^({'|'.join(LABELS + OTHER_SECTIONS)}):(?=\s)"
    pieces = re.split(pattern, inspect.cleandoc(docstring), flags=re.MULTILINE)
    pairs = list(zip(pieces[1::2], pieces[2::2], strict=True))
    return [(label, text.strip()) for label, text in pairs if label not in OTHER_SECTIONS]


def faults(docstring):
    """What a docstring lacks, as a list of sentences."""
    parts = labelled_parts(docstring)
    labels = tuple(label for label, _ in parts)
    if labels != LABELS:
        return [f"labels are {labels}"]
    texts = dict(parts)
    short = [
        f"{label} says too little: {text!r}"
        for label, text in texts.items()
        if len(text.split()) < FEWEST_WORDS and (label, text.rstrip(".")) != ("Deviations", "none")
    ]
    return short + ([] if YEAR.search(texts["Paper"]) else ["Paper has no year"])


def factory_of(name):
    return registry._ENTRIES[base_name(name)].factory


@pytest.mark.parametrize("name", attacks.names())
def test_docstring_has_its_parts_in_order(name):
    assert faults(factory_of(name).__doc__ or "") == []


@pytest.mark.parametrize("name", attacks.names())
def test_example_is_among_those_that_make_test_runs(name):
    factory = factory_of(name)
    module = inspect.getmodule(factory)
    file = pathlib.Path(module.__file__).resolve()
    assert file.is_relative_to(pathlib.Path(he_keras.__file__).resolve().parent)
    # pytest searches the names of a module: another object of the same name would hide this one.
    assert getattr(module, factory.__name__) is factory
    found = doctest.DocTestFinder(recurse=False).find(factory, factory.__name__, module)
    examples = [example for test in found for example in test.examples]
    assert any(example.want for example in examples), "an example that shows what it returns"
    assert not any("doctest: +SKIP" in example.source for example in examples)


def test_make_test_runs_the_examples_of_the_package():
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.MULTILINE).group(1)
    assert "--doctest-modules" in recipe
    assert "he_keras" in recipe.split()


GOOD = """Summary.

Paper: Nobody et al. 1999,
    "A title".
Assumes: logits and gradients.
Cost: one forward pass.
Deviations: none

Args:
    threat: the threat model.

Example:
    >>> 1 + 1
    2
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", None),
        ("1999", "99", "no year"),
        ("Cost: one forward pass.\n", "", "labels"),
        ("Cost: one", "Costs: one", "labels"),
        ("Cost: one forward pass.", "Cost: little.", "Cost says too little"),
        ("Deviations: none", "Deviations: few", "Deviations says too little"),
        ("Example:\n", "Args:\n", "labels"),
        (
            "Assumes: logits and gradients.\nCost: one forward pass.",
            "Cost: one forward pass.\nAssumes: logits and gradients.",
            "labels",
        ),
    ],
)
def test_a_fault_is_found(old, new, expected):
    found = faults(GOOD.replace(old, new))
    assert (found == []) if expected is None else (len(found) == 1 and expected in found[0])
