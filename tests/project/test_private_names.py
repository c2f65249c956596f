"""The private names of Keras, keras-tuner and TensorFlow that the package depends on: all of them.

A release may change a private name without notice. So each stands in this one table, with the
reason. A test fails as soon as the name has gone, or as soon as there is a public one. Another test
fails if the package uses a private name that is not in the table.

he_keras/distribution/keras_repairs.py lists what Keras does wrong with several replicas, and the
tests that tell when the repairs can go.
"""

import ast
import importlib
import inspect
import pathlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import keras_tuner
import pytest

import he_keras

PACKAGE = pathlib.Path(he_keras.__file__).parent
LIBRARIES = ("keras", "keras_tuner", "tensorflow")
#: Private by their spelling only: methods of named tuples, and names of Python's own modules.
PYTHONS_OWN = {"_asdict", "_fields", "_replace", "_exit", "_Decompress"}


class PrivateName(NamedTuple):
    """A name, a function that returns the object that has it, and why the package needs it."""

    name: str
    owner: Callable[[], Any]
    reason: str


def functional_model():
    images = keras.Input((2,))
    return keras.Model(images, keras.layers.Dense(1)(images))


def bayesian_oracle():
    return keras_tuner.oracles.BayesianOptimizationOracle(keras_tuner.Objective("score", "max"))


PRIVATE_NAMES = (
    PrivateName(
        "_flatten_layers",
        lambda: keras.layers.Layer,
        "All layers of a model, those inside other layers included. `Model.layers` has the "
        "outermost ones only, and other layers do not say what they contain.",
    ),
    PrivateName(
        "_keras_history",
        lambda: keras.Input((2,)),
        "The layer that a symbolic tensor comes from: the last layer of a functional model tells "
        "whether its outputs are probabilities.",
    ),
    PrivateName(
        "_inbound_nodes",
        lambda: keras.layers.Dense(1),
        "How often a layer of a functional model is called: a head that is called twice is not "
        "taken apart from its network.",
    ),
    PrivateName(
        "__mro__",
        lambda: keras.layers.RandomFlip,
        "The class that all of Keras's image layers share has no public name. It is found as the "
        "first base of one of them, to tell layers that change images.",
    ),
    PrivateName(
        "_run_through_graph",
        lambda: keras.Function,
        "Runs a functional model with other operations in place of its layers (he_keras/cpu).",
    ),
    PrivateName(
        "_nodes_by_depth",
        functional_model,
        "The calls of a functional model's layers, in their order (he_keras/cpu).",
    ),
    PrivateName(
        "_get_call_context",
        lambda: keras.layers.Dense(1),
        "The training mode that an enclosing layer was called in.",
    ),
    PrivateName(
        "_maybe_reset_call_context",
        lambda: keras.layers.Dense(1),
        "Ends the training mode of a call that Keras does not know of.",
    ),
    PrivateName(
        "AutocastScope",
        lambda: importlib.import_module("keras.src.backend"),
        "Casts variables to a layer's compute dtype in a call that Keras does not know of.",
    ),
    PrivateName(
        "_get_own_losses",
        lambda: keras.layers.Dense(1),
        "The losses that a layer added in this call, without those of the layers inside it.",
    ),
    PrivateName(
        "_get_variable_index",
        keras.optimizers.SGD,
        "The place of a variable's momentum among the optimizer's variables.",
    ),
    PrivateName(
        "_iterations",
        keras.optimizers.SGD,
        "Batches trained on. The public `iterations` counts updates, which are fewer with gradient "
        "accumulation.",
    ),
    PrivateName(
        "_maybe_symbolic_build",
        lambda: keras.Model,
        "Overridden: Keras averages the first batch over the replicas.",
    ),
    PrivateName(
        "_make_function",
        lambda: keras.Model,
        "Overridden: under XLA, Keras compiles the checks of a batch away.",
    ),
    PrivateName(
        "control_flow_util",
        lambda: importlib.import_module("tensorflow.python.ops"),
        "Whether a function is being traced for XLA, which knows no shapes that depend on values.",
    ),
    PrivateName(
        "_save_trial",
        lambda: keras_tuner.Oracle,
        "Overridden: keras-tuner writes a trial's file in place, and a kill leaves half of it.",
    ),
    PrivateName(
        "_retry_queue",
        bayesian_oracle,
        "The trials to run again: those of lost workers are put there.",
    ),
    PrivateName(
        "_random_state",
        bayesian_oracle,
        "Replaced before each draw: keras-tuner does not save it.",
    ),
    PrivateName(
        "DEBUG",
        lambda: importlib.import_module("keras_tuner.src.config"),
        "Keeps keras-tuner from printing the traceback of a failed trial.",
    ),
)
NAMES = {each.name for each in PRIVATE_NAMES}
#: These exist with another meaning.
OTHER_PUBLIC_NAMES = {"_iterations"}


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: entry.name)
def test_the_name_exists_and_is_still_private(entry):
    owner = entry.owner()
    assert hasattr(owner, entry.name), f"{entry.name} has gone: {entry.reason}"
    public = entry.name.lstrip("_")
    if public != entry.name and entry.name not in OTHER_PUBLIC_NAMES:
        assert not hasattr(owner, public), f"use {public}, which is public now: {entry.reason}"


def test_the_base_of_image_layers_is_the_one_that_is_meant():
    bases = [each.__mro__[1] for each in (keras.layers.RandomFlip, keras.layers.RandomZoom)]
    assert [each.__name__ for each in bases] == ["BaseImagePreprocessingLayer"] * 2


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_of(tree):
    """Returns the private names that a module uses, and all names that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.attr)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            used.add(node.attr)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".__mro__"):
            used.add("__mro__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            parts = node.module.split(".")
            if "src" in parts or "python" in parts:
                used |= {alias.name for alias in node.names}
    return used, defined


def used_names():
    found = [names_of(ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]
    defined = set.union(*(each for _, each in found))
    return set.union(*(each for each, _ in found)) - defined - PYTHONS_OWN


def overridden_names():
    """Returns the private names of the libraries' classes that our classes override."""
    folders = ("he_keras.benchmarks", "he_keras.programs")
    names = [each.name for each in pkgutil.walk_packages([str(PACKAGE)], "he_keras.")]
    modules = [importlib.import_module(each) for each in names if not each.startswith(folders)]
    found = set()
    for kind in [each for module in modules for each in vars(module).values()]:
        if inspect.isclass(kind) and kind.__module__.startswith("he_keras"):
            theirs = [base for base in kind.__mro__ if base.__module__.startswith(LIBRARIES)]
            inherited = {name for base in theirs for name in vars(base)}
            found |= {name for name in vars(kind) if is_private(name) and name in inherited}
    # Python's abstract classes and Keras set these on every class.
    return found - {"_abc_impl", "_auto_config"}


def test_no_other_private_name_is_used():
    # `config` is the module of `DEBUG`. The other two are assigned to, and so taken for our own.
    expected = NAMES - {"DEBUG", "_retry_queue", "_random_state"} - overridden_names()
    assert used_names() - {"config"} - overridden_names() == expected


def test_no_other_private_name_is_overridden():
    assert overridden_names() == {"_maybe_symbolic_build", "_make_function", "_save_trial"}


def test_private_names_are_found_in_every_form():
    source = (
        "from keras.src.backend import a\nfrom keras import b\nx._c()\nself._d = x._d\ny._e = 1\n"
        "z.__mro__[1]"
    )
    used, defined = names_of(ast.parse(source))
    assert used - defined == {"a", "_c", "__mro__"}
