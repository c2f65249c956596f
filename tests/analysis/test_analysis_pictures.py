"""Class weights, perturbations and FN in the attack against closed forms."""

import base64
import io

import numpy as np
import pytest
import tensorflow as tf
from analysis_subjects import drawn, he_model, linear_model, subject, texts
from PIL import Image

from he_keras import analysis
from he_keras.analysis import feature_norm_attack
from he_keras.analysis.class_weights import simplex_angle

# Class weights


def test_angles_and_norms():
    kernel = np.array([[2.0, 0.0, -1.0], [0.0, 3.0, 1.0]])
    geometry = analysis.class_weight_geometry(kernel)
    np.testing.assert_allclose(geometry["norms"], [2, 3, np.sqrt(2)])
    np.testing.assert_allclose(
        geometry["angles"], [[0, 90, 135], [90, 0, 45], [135, 45, 0]], atol=1e-5
    )


def test_a_class_without_weights_has_no_angle():
    angles = analysis.class_weight_geometry(np.array([[2.0, 0.0], [1.0, 0.0]]))["angles"]
    assert angles[0, 0] == 0 and np.isnan(angles[[0, 1, 1], [1, 0, 1]]).all()


@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_the_simplex_is_where_all_angles_are_equal(num_classes):
    centred = np.eye(num_classes) - 1 / num_classes
    angles = analysis.class_weight_geometry(centred)["angles"]
    pairs = angles[np.triu_indices(num_classes, k=1)]
    np.testing.assert_allclose(pairs, simplex_angle(num_classes), atol=1e-5)


def test_class_weights_of_both_heads():
    kernel = np.array([[2.0, 0.0, -1.0], [0.0, 3.0, 1.0]])
    images, labels = [[0.1, 0.2]], [0]
    subjects = [
        subject(linear_model(kernel, [9.0, 0.0, 0.0]), images, labels, name="linear"),
        subject(he_model(kernel), images, labels, name="he"),
    ]
    built = analysis.get("class-weights")
    numbers = built.measure(subjects)
    for name in ("linear", "he"):
        entry = numbers[name]
        assert entry["smallest_angle"] == pytest.approx(45, abs=1e-4)
        assert entry["mean_angle"] == pytest.approx(90, abs=1e-4)
        assert entry["largest_angle"] == pytest.approx(135, abs=1e-4)
        assert entry["simplex_angle"] == pytest.approx(120)
        norms = np.array([2, 3, np.sqrt(2)])
        assert entry["norm_spread"] == pytest.approx(norms.std() / norms.mean(), rel=1e-5)
    figure = drawn(built, analysis.analysis.plain(numbers))
    assert {"linear", "he", "45", "90", "135", "norm of weights"} <= set(texts(figure))
    counts = [bar.get_height() for bar in figure.axes[2].patches]
    assert sum(counts) == 3


def test_class_weights_need_a_kernel():
    function = subject(lambda images: images, [[0.1, 0.2]], [0])
    with pytest.raises(ValueError, match="weights of the head.*received no layer"):
        analysis.get("class-weights").measure([function])


# Perturbations


def striped(height=6, width=6):
    """An image of upright stripes two pixels wide, (height, width, 1)."""
    return np.tile((np.arange(width) // 2 % 2)[None, :, None] * 0.5 + 0.25, (height, 1, 1))


def test_statistics_of_perturbations():
    images = np.stack([striped()] * 2).astype("float32")
    # Rises by 0.1 where the stripe left of an edge ends, and nowhere else.
    changes = 0.1 * (np.arange(6) % 2)[None, None, :, None] * np.ones_like(images)
    found = analysis.perturbation_statistics(images, images + changes)
    assert found["edge_correlation"] == pytest.approx(1.0, abs=1e-5)
    assert found["mean_absolute_change"] == pytest.approx(0.05, abs=1e-6)
    # 30 sideways pairs are opposite and 30 downward pairs are equal; 27 and 33 of 60 are not 0.
    expected = (15 / 60 - 27 / 60 * 33 / 60) / (27 / 60 * 33 / 60)
    assert found["neighbour_correlation"] == pytest.approx(expected, abs=1e-5)
    noise = np.random.RandomState(0).normal(0, 0.01, (2, 40, 40, 3))
    assert abs(analysis.perturbation_statistics(0 * noise, noise)["neighbour_correlation"]) < 0.03
    smooth = np.broadcast_to(np.arange(40.0)[:, None, None], (1, 40, 40, 3)) / 100
    assert analysis.perturbation_statistics(0 * smooth, smooth)["neighbour_correlation"] > 0.99


def pixels_of(png):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


def image_subject(sign, images, labels, name):
    """Logits plus and minus the sum of the left half minus that of the right half."""
    weights = np.where(np.arange(images.shape[2]) < images.shape[2] // 2, 1.0, -1.0)
    direction = np.tile(weights[None, :, None], (images.shape[1], 1, images.shape[3]))
    kernel = sign * np.stack([direction.ravel(), -direction.ravel()], axis=1).astype("float32")

    def logits(batch):
        return tf.reshape(batch, [-1, kernel.shape[0]]) @ kernel

    return subject(logits, images, labels, name=name)


@pytest.mark.slow
def test_perturbations_of_linear_models():
    images = np.full((3, 4, 4, 1), 0.5, np.float32)
    images[:, :, :2] += np.array([-0.05, 0.3, 0.02])[:, None, None, None]
    labels = [0, 0, 0]
    built = analysis.get("perturbations", num_images=1, num_steps=5)
    mine = image_subject(1.0, images, labels, "mine")
    other = image_subject(2.0, images, labels, "other")
    numbers = built.measure([mine, other])
    # The first image is wrong from the start, and so not shown.
    assert numbers["positions"].tolist() == [1] and numbers["labels"].tolist() == [0]
    entry = numbers["models"]["mine"]
    # Down where the weight is positive, up elsewhere, all by epsilon = 0.1.
    expected = np.tile([0, 0, 255, 255], (4, 1))
    np.testing.assert_array_equal(pixels_of(entry["perturbations"][0]), expected)
    np.testing.assert_allclose(entry["magnification"], [5.0], rtol=1e-4)
    np.testing.assert_array_equal(
        pixels_of(numbers["images"][0]), np.tile([204, 204, 128, 128], (4, 1))
    )
    assert entry["predictions"].tolist() == [0]
    assert entry["robust_accuracy"] == pytest.approx(1 / 3)
    assert entry["mean_absolute_change"] == pytest.approx(0.1, abs=1e-5)

    plain = analysis.analysis.plain(numbers)
    figure = drawn(built, plain)
    assert len(figure.axes) == 3
    assert {"image", "mine\nx 5", "class 0", "-> 0"} <= set(texts(figure))
    assert built.table(plain).startswith("mine: correlation of neighbouring changes")


def test_pictures_need_the_same_colour_images():
    images = np.full((2, 4, 4, 1), 0.5, np.float32)
    first = image_subject(1.0, images, [0, 0], "first")
    with pytest.raises(ValueError, match="same images.*received other images for second than for"):
        analysis.get("perturbations").measure(
            [first, image_subject(1.0, images + 0.1, [0, 0], "second")]
        )
    with pytest.raises(ValueError, match=r"cannot be shown; .* received shape \(1, 2\) for mine"):
        analysis.get("perturbations").measure([subject(linear_model(np.eye(2)), [[0, 1]], [0])])


# FN in the attack


@pytest.mark.slow
def test_fn_in_the_attack_turns_along_the_sphere():
    # w_1 - w_0 = (-1, -0.2): plain cross-entropy lowers both pixels, which costs 1.2 epsilon of
    # margin. Along the sphere at (0.5, 0.5) the direction is (-1, 1): 0.8 epsilon.
    model = linear_model([[0.5, -0.5], [0.1, -0.1]], bias=[-0.25, 0.25])
    epsilon, point = 0.1, np.array([0.5, 0.5])
    margin = point @ [1.0, 0.2] - 0.5
    assert 0.8 * epsilon < margin < 1.2 * epsilon
    mine = subject(model, [point, point], [0, 1], epsilon=epsilon)
    built = analysis.get(
        "feature-norm-attack", num_steps=(1,), step_sizes=("1/10",), starts=("image",)
    )
    entry = built.measure([mine])["mine"]
    assert entry["clean"] == 0.5
    (row,) = entry["rows"]
    assert (row["num_steps"], row["step_size"], row["start"]) == (1, "1/10", "image")
    assert (row["without FN"], row["with FN"], row["FN, own scale"]) == (0.0, 0.5, 0.5)


def test_own_scale_keeps_the_logits_and_removes_the_radial_gradient():
    kernel = np.array([[1.0, -2.0, 0.5], [0.3, 0.7, -1.0]], np.float32)
    model = linear_model(kernel, bias=[0.1, 0.2, 0.3])
    images = tf.constant([[0.6, 0.8]])
    changed = feature_norm_attack._without_radial_gradient(model)
    with tf.GradientTape() as tape:
        tape.watch(images)
        logits = changed(images)
    np.testing.assert_allclose(logits, model(images), atol=1e-6)
    jacobian = tape.jacobian(logits, images).numpy()[0, :, 0]
    tangent = np.array([0.8, -0.6])
    np.testing.assert_allclose(jacobian @ np.array([0.6, 0.8]), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(jacobian @ tangent, tangent @ kernel, atol=1e-6)


def test_picture_of_the_attacks():
    built = analysis.get("feature-norm-attack")
    row = {"num_steps": 1, "step_size": "1/10", "start": "image"}
    far = {**row, "without FN": 0.0, "with FN": 0.5, "FN, own scale": 0.5}
    near = {**row, "without FN": 0.5, "with FN": 0.5, "FN, own scale": 0.5}
    entry = {"clean": 0.5, "rows": [far, near]}

    figure = drawn(built, {"mine": entry})
    bars = [[bar.get_height() for bar in group] for group in figure.axes[0].containers]
    assert bars == [[0, 50], [50, 50], [50, 50]]
    assert "PGD-1\nstep 1/10\nfrom image" in texts(figure)
    assert built.table({"mine": entry}).splitlines()[2].split() == (
        ["1", "1/10", "image", "0.0%", "50.0%", "50.0%"]
    )


def test_the_grid_of_settings(monkeypatch):
    built = analysis.get("feature-norm-attack")
    monkeypatch.setattr(built, "_accuracy", lambda *arguments: 0.0)
    mine = subject(linear_model(np.eye(2)), [[0.9, 0.2]], [0], epsilon=0.031)
    rows = built.measure([mine])["mine"]["rows"]
    found = [(row["num_steps"], row["step_size"], row["start"]) for row in rows]
    steps, starts = ("0.003", "2/255"), ("image", "uniform")
    assert found == [(count, step, start) for count in (1, 2) for step in steps for start in starts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": (0,)}, "num_steps=0"),
        ({"num_steps": 2}, "expected a tuple; received num_steps=2"),
        ({"step_sizes": ("-1",)}, "step_sizes='-1'"),
        ({"starts": ("anywhere",)}, "Unknown starts.*'anywhere'"),
    ],
)
def test_mistakes_in_the_grid(options, message):
    with pytest.raises(ValueError, match=message):
        analysis.get("feature-norm-attack", **options)
