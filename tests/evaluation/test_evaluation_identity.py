"""A folder of results belongs to one function, one set of images and one plan."""

import json
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from evaluation_program import when_written

import he_keras as he
from he_keras.evaluation.run import facts, identity, journal

pytestmark = pytest.mark.usefixtures("op_by_op")

THREAT = he.ThreatModel("linf", "8/255")
NUM_EXAMPLES = 12
# A class for each feature, and unequal slopes: nothing is alike by chance.
KERNEL = tf.constant(np.random.RandomState(3).normal(size=(6, 3)).astype("float32"))


def plain(images):
    return images @ KERNEL


def scaled(images):
    return 500.0 * plain(images)


def preprocessed(images):
    return plain(tf.round(images * 4.0) / 4.0 + 0.1 * images)


def masked(images):
    """The same logits everywhere, and another gradient."""
    return tf.stop_gradient(plain(images)) + 1e-3 * (
        plain(images) - tf.stop_gradient(plain(images))
    )


def examples(count=NUM_EXAMPLES, seed=0):
    images = np.random.RandomState(seed).uniform(0.1, 0.9, (count, 6)).astype("float32")
    return images, plain(images).numpy().argmax(axis=1)


def evaluate(model, folder, attacks=("fgsm",), threat=THREAT, data=None, **options):
    settings = {"checks": False, "batch_size": 6, "mode": "survivors", **options}
    return he.evaluate_robustness(model, data or examples(), threat, attacks, folder, **settings)


def refused(model, folder, **options):
    """What the one sentence says is different."""
    with pytest.raises(ValueError) as caught:
        evaluate(model, folder, **options)
    found = re.fullmatch(
        r"The folder holds another evaluation; expected the function, images and settings that it "
        r"began with; received (.*) \(folder .*\); use another output_dir, or delete this one",
        str(caught.value),
    )
    assert found, str(caught.value)
    return found[1]


def classifier(scale=1.0, factor=1.0, objective=None):
    """The same weights each time, and names that Keras counts up."""
    network = keras.Sequential([keras.Input((6,)), keras.layers.Rescaling(factor)])
    head = he.CosineHead(3, scale=scale)
    model = he.HEAdversarialModel(network, head, objective, evaluation_attack=None)
    model(np.zeros((1, 6), "float32"))
    model.head.kernel.assign(KERNEL)
    return model


@pytest.fixture(scope="module")
def of_a_function(tmp_path_factory):
    folder = tmp_path_factory.mktemp("function")
    return evaluate(plain, folder), folder


@pytest.fixture(scope="module")
def of_a_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return evaluate(classifier(), folder), folder


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (scaled, "logits on probe images: .* apart"),
        (preprocessed, "logits on probe images: .* apart"),
        (masked, "gradient on probe images: 99.90% apart \\(rounding: up to 5.00%\\)"),
        (classifier(), "model: function -> HEAdversarialModel"),
    ],
    ids=["scale", "preprocessing", "gradient", "kind"],
)
def test_another_function_with_the_same_predictions_is_refused(of_a_function, model, found):
    images, labels = examples()
    assert (np.argmax(model(tf.constant(images)), axis=1) == labels).mean() > 0.7
    assert re.match(found, refused(model, of_a_function[1]))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (lambda: classifier(scale=500.0), "head scale: 1 -> 500"),
        (lambda: classifier(factor=0.5), "network layers 1 (Rescaling) scale: 1 -> 0.5"),
    ],
    ids=["scale", "preprocessing"],
)
def test_the_same_weights_in_another_function_are_refused(of_a_model, model, found):
    assert facts.weights_digest(model()) == facts.weights_digest(classifier())
    assert refused(model(), of_a_model[1]) == found


def test_a_scale_that_is_edited_in_place_is_refused(of_a_model):
    """As docs/how-to/search.md shows it for attacks alone."""
    model = classifier()
    model.head.scale = 500.0
    assert refused(model, of_a_model[1]) == "head scale: 1 -> 500"


def test_the_same_model_built_again_goes_on(of_a_model):
    report, folder = of_a_model
    written = when_written(folder / "adversarial")
    assert evaluate(classifier(), folder).worst_case == report.worst_case
    assert when_written(folder / "adversarial") == written != {}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"attacks": ["pgd-10"]}, "attacks: fgsm -> pgd-10"),
        ({"attacks": ["fgsm", "pgd-2"]}, "attacks: fgsm -> fgsm, pgd-2"),
        ({"threat": he.ThreatModel("linf", "4/255")}, "epsilon: 8/255 -> 4/255, fgsm step_size: "),
        ({"mode": "individual"}, "mode: survivors -> individual"),
        ({"data": examples(11)}, "num_examples: 12 -> 11"),
        ({"data": (examples()[0] * 0.999, examples()[1])}, "data: other images or labels"),
        ({"logit_scale": 2.0}, "attacks: fgsm -> fgsm, cw-linf-20"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_only_the_difference_is_said(of_a_model, options, found):
    assert refused(classifier(), of_a_model[1], **options).startswith(found)
    assert len(refused(classifier(), of_a_model[1], **options)) < 100


def test_an_attack_of_another_class_under_the_same_name_is_refused(of_a_function):
    class Other(he.attacks.ProjectedGradient):
        pass

    fgsm = he.attacks.get("fgsm", THREAT, batch_size=6)
    config = {**fgsm.get_config(), "threat": THREAT}
    assert "class: FGSM -> Other" in refused(plain, of_a_function[1], attacks=[Other(**config)])


def test_another_substitute_behind_the_same_path_is_refused(tmp_path):
    path = tmp_path / "substitute.keras"

    def attack(factor):
        head = keras.layers.Dense(3, use_bias=False)
        substitute = keras.Sequential([keras.Input((6,)), keras.layers.Rescaling(factor), head])
        head.set_weights([KERNEL.numpy()])
        substitute.save(path)
        return [he.attacks.get(f"transfer:{path}", THREAT, num_steps=1, batch_size=6)]

    evaluate(plain, tmp_path / "out", attack(1.0))
    found = refused(plain, tmp_path / "out", attacks=attack(-1.0))
    assert re.match(r"transfer:.* substitute config: others$", found)


def test_an_earlier_versions_folder_is_refused_with_the_reason(of_a_function, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(of_a_function[1], folder)
    path = folder / "adversarial" / "settings.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model": "f" * 64}))
    with pytest.raises(ValueError, match="recorded the weights and not the function"):
        evaluate(plain, folder)
    path.write_text(json.dumps({**content, "he_keras": "0.0.1"}))
    assert refused(plain, folder).startswith("he_keras: 0.0.1 -> ")


def test_recorded_positions_are_those_asked_for(of_a_function, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(of_a_function[1], folder)
    first, second = sorted(folder.glob("adversarial/block-*/*.npz"))
    shutil.copy(second, first)
    message = r"of other examples; expected those at positions 0, 1, 2, 3, \.\.\. \(6\); received 6"
    with pytest.raises(ValueError, match=message):
        evaluate(plain, folder)


@pytest.mark.parametrize("kind", ["block-*", "clean"])
def test_a_file_of_another_plan_is_not_taken_for_this_ones(tmp_path, kind):
    """Files of two folders were copied together: the same attack's name, and another step."""
    evaluate(plain, tmp_path / "weak", ["pgd-2"], step_size=0.001)
    evaluate(plain, tmp_path / "out", ["pgd-2"])
    for path in (tmp_path / "weak" / "adversarial").glob(f"{kind}/*.npz"):
        shutil.copy(path, tmp_path / "out" / "adversarial" / path.parent.name / path.name)
    message = r"of another evaluation; .* received pgd-2 step_size: 0.001 -> 10/255 in "
    with pytest.raises(ValueError, match=message):
        evaluate(plain, tmp_path / "out", ["pgd-2"])


def test_checks_of_another_plan_are_not_taken_for_this_ones(tmp_path):
    journal.Journal(tmp_path, {"mode": "survivors", "attacks": []}).record_json("checks.json", [1])
    plan = {"mode": "individual", "attacks": []}
    with pytest.raises(ValueError, match="received mode: survivors -> individual in "):
        journal.Journal(tmp_path, plan).recall_json("checks.json")


def test_an_attack_that_hides_a_setting_is_refused(tmp_path):
    class Hidden(he.attacks.ProjectedGradient):
        def __init__(self, threat, strength, **options):
            super().__init__(threat, num_steps=1, **options)
            self._strength = strength

    with pytest.raises(ValueError, match="nobody can see; .* received none named 'strength'"):
        evaluate(plain, tmp_path, [Hidden(THREAT, 1.0)])
    assert not list(tmp_path.glob("adversarial/block-*"))


def test_long_differences_are_cut_to_where_they_differ():
    before, after = ({"model": {"class": "A", "mean": [0.5] * 64 + [end]}} for end in (0.5, 0.7))
    (found,) = facts.model_differences(before["model"], after["model"])
    assert found.startswith("mean: ...") and found.endswith("0.5] -> ...5, 0.5, 0.5, 0.5, 0.7]")
    layers = [{"class_name": "Dense", "config": {"units": 3}}]
    one, other = ({"class": "A", "config": {"layers": count * layers}} for count in (1, 2))
    assert facts.model_differences(one, other) == ["layers: 1 -> 2"]


# Rounding and randomness


def test_rounding_of_another_machine_is_no_other_function(of_a_function):
    report, folder = of_a_function

    def elsewhere(images):
        return plain(images) * (1.0 + 1e-5 * tf.stop_gradient(tf.sin(1e4 * images[:, :3]))) + 1e-6

    assert evaluate(elsewhere, folder).worst_case == report.worst_case


def test_verdicts_on_clean_images_are_those_of_the_first_time(tmp_path):
    """An example on the boundary is right on one CPU and wrong on another."""
    images, labels = examples()
    images[0] = 0.0
    labels[0] = 1
    first = evaluate(lambda x: plain(x) + [[0.0, 1e-7, 0.0]], tmp_path, data=(images, labels))
    again = evaluate(lambda x: plain(x) + [[1e-7, 0.0, 0.0]], tmp_path, data=(images, labels))
    assert first.correct["clean"][0] and again.correct["clean"][0]
    assert again.worst_case == first.worst_case


def noisy(factor=1.0):
    def logits(images):
        return factor * plain(images + tf.random.normal(tf.shape(images), stddev=0.05))

    return logits


def test_a_random_model_goes_on_and_is_told_from_another(tmp_path):
    report = evaluate(noisy(), tmp_path)
    for _ in range(2):
        again = evaluate(noisy(), tmp_path)
        np.testing.assert_array_equal(again.correct["clean"], report.correct["clean"])
        assert again.worst_case == report.worst_case
    assert re.match("(logits|noise)", refused(noisy(factor=20.0), tmp_path))
    assert refused(plain, tmp_path).startswith("noise of the logits")


def test_noise_is_the_models_own_and_not_the_difference_to_another():
    probes = identity.probes_of(examples()[0], THREAT)
    one, other = (identity.answers_of(model, probes) for model in (plain, noisy()))
    assert one.noise[0] < 1e-5 * one.spread < other.noise[0]
    assert other.are_random and not one.are_random


def test_probes_are_images_of_the_data_and_images_at_the_edge():
    images, _ = examples(100)
    probes = identity.probes_of(images, THREAT)
    clean, moved = np.split(probes, 2)
    assert {image.tobytes() for image in clean} <= {image.tobytes() for image in images}
    np.testing.assert_allclose(np.abs(moved - clean), THREAT.epsilon, rtol=1e-5)
    np.testing.assert_array_equal(probes, identity.probes_of(images, THREAT))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_answers_that_are_not_finite_are_compared_too(value):
    def broken(images):
        return tf.where(images[:, :3] > 0.5, value, plain(images))

    probes = identity.probes_of(examples()[0], THREAT)
    first, again, other = (identity.answers_of(model, probes) for model in (broken, broken, plain))
    assert identity.answer_differences(first, again) == []
    assert identity.answer_differences(first, other)


def test_a_model_without_gradient_is_known_by_its_logits(tmp_path):
    def steps(images):
        return tf.stop_gradient(plain(images))

    attacks = [he.attacks.get("spsa-1", THREAT, num_samples=2, batch_size=6)]
    report = evaluate(steps, tmp_path, attacks)
    assert evaluate(steps, tmp_path, attacks).worst_case == report.worst_case
    assert refused(plain, tmp_path, attacks=attacks).startswith("gradient on probe images")


# What is no part of the function


def test_facts_are_blind_to_names_and_to_training():
    trained = classifier(objective=he.objectives.Standard())
    trained.network.trainable = False
    trained.head.kernel_initializer = keras.initializers.Zeros()
    assert facts.model_facts(trained) == facts.model_facts(classifier())
    json.dumps(facts.model_facts(trained))


def test_branches_that_are_wired_otherwise_are_another_function():
    def branches(swapped):
        images = keras.Input((6,))
        layers = [keras.layers.ReLU(), keras.layers.Activation("tanh")]
        first, second = (layer(images) for layer in layers)
        pair = [second, first] if swapped else [first, second]
        return keras.Model(images, keras.layers.Subtract()(pair))

    one, again, other = (facts.model_facts(branches(each)) for each in (0, 0, 1))
    assert one == again != other


def test_a_model_without_a_configuration_has_facts():
    class Own(keras.Model):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, images):
            return self.function(images)

    assert facts.model_facts(Own(plain)) == {"class": "Own", "config": None}


def test_half_precision_is_given_more_room_unless_it_is_new():
    """In a layer, or hidden in a function that declares nothing."""
    probes = identity.probes_of(examples()[0], THREAT)
    layer = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype="mixed_bfloat16")])

    def half(images):
        return tf.cast(tf.cast(images, tf.bfloat16) @ tf.cast(KERNEL, tf.bfloat16), tf.float32)

    models = (layer, lambda images: layer(images), half, plain)
    limits = [float(identity.answers_of(model, probes).limit) for model in models]
    assert limits == 3 * [identity.HALF_LIMIT] + [identity.LIMIT]
    one, other = (identity.answers_of(model, probes) for model in (plain, half))
    assert identity.answer_differences(one, other)
    assert identity.answer_differences(other, other) == []
    moved = other._replace(logits=other.logits + 0.02 * other.spread)
    assert identity.answer_differences(other, moved) == []


def test_clean_margins_of_every_example_are_compared(tmp_path):
    """A model that differs on one image only, and on none of the probes."""
    record = journal.Journal(tmp_path, tolerance=0.1)
    verdicts = journal.Scored(np.zeros(3, "int32"), np.zeros(3, bool), np.array([1.0, 2.0, np.nan]))
    record.settle(0, verdicts)
    near = verdicts._replace(margin=np.array([1.05, 2.0, np.nan]))
    np.testing.assert_array_equal(record.settle(0, near).margin, verdicts.margin)
    for margin in ([1.2, 2.0, np.nan], [1.0, np.nan, np.nan], [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match="expected the answers to clean images"):
            record.settle(0, verdicts._replace(margin=np.array(margin)))
