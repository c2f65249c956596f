"""Faults of searches for the nearest image or without gradients: as the list of the attacks."""

FAULTS = [
    # Nearest boundaries: DeepFool, FAB, Carlini and Wagner.
    (
        "FAB's weight of the clean image is always the largest",
        "attacks/fab.py",
        "alpha = tf.minimum(length / (length + image_length), self.alpha_max)",
        "alpha = tf.fill(tf.shape(length), tf.cast(self.alpha_max, length.dtype))",
        "tests/attacks/test_attack_references.py::test_fab_step_by_step[{}-l2]",
    ),
    (
        "FAB does not go back",
        "attacks/fab.py",
        "back = images + self.beta * (point - images)",
        "back = point",
        "tests/attacks/test_attack_references.py::test_fab_step_by_step[{}-l2]",
    ),
    (
        "FAB stops on the boundary",
        "attacks/fab.py",
        "mixture = (1.0 - alpha) * (point + self.eta * step)",
        "mixture = (1.0 - alpha) * (point + step)",
        "tests/attacks/test_attack_references.py::test_fab_step_by_step[{}-linf]",
    ),
    (
        "FAB keeps the last adversarial image, not the nearest",
        "attacks/fab.py",
        "state.best.updated(point, -distance, wrong",
        "state.best.updated(point, distance, wrong",
        "tests/attacks/test_attack_references.py::test_fab_step_by_step[{}-l2]",
    ),
    (
        "steps to a hyperplane leave the bounds",
        "balls.py",
        "return tf.where(_is_out_of_reach(way, gain), room, tf.minimum(length, room))",
        "return length",
        "tests/layers/test_hyperplane_projection.py::test_equals_bisection[0-bounds0-linf]",
    ),
    (
        "nearest boundary in the primal norm",
        "balls.py",
        'DUAL = {"linf": "l1", "l2": "l2", "l1": "linf"}',
        'DUAL = {"linf": "linf", "l2": "l2", "l1": "linf"}',
        "tests/attacks/test_attacks_closed_form.py::test_distance_of_the_nearest_linear_boundary[linf]",
    ),
    (
        "targets of FAB in the wrong order",
        "attacks/framework/result.py",
        "return tf.math.top_k(ranked, k=num_classes).indices[:, 1:]",
        "return tf.math.top_k(-ranked, k=num_classes).indices[:, :-1]",
        "tests/attacks/test_attacks_closed_form.py::test_other_classes_are_those_of_largest_logit",
    ),
    (
        "DeepFool without overshoot",
        "attacks/deepfool.py",
        "x_adv = self.threat.clip_to_bounds(images + (1.0 + self.overshoot) * perturbation)",
        "x_adv = self.threat.clip_to_bounds(images + perturbation)",
        "tests/attacks/test_attacks_closed_form.py::"
        "test_deepfool_goes_beyond_the_boundary_by_its_overshoot[linf]",
    ),
    (
        "C&W's constant grows after a success",
        "attacks/carlini_wagner.py",
        "const = tf.where(tf.math.is_inf(upper), tenfold, 0.5 * (lower + upper))",
        "const = tenfold",
        "tests/attacks/test_attacks_closed_form.py::test_constants_of_the_search_by_hand",
    ),
    (
        "C&W's search never raises its lower end",
        "attacks/carlini_wagner.py",
        "lower = tf.where(search.found, search.lower, search.const)",
        "lower = search.lower",
        "tests/attacks/test_attacks_closed_form.py::test_constants_of_the_search_by_hand",
    ),
    (
        "C&W's objective without the distance",
        "attacks/carlini_wagner.py",
        " + mask_like(search.const, x_adv) * gradient) * slope",
        " * 0.0 + mask_like(search.const, x_adv) * gradient) * slope",
        "tests/attacks/test_attacks_closed_form.py::test_carlini_wagner_finds_the_distance_to_a_hyperplane",
    ),
    # Black boxes, targets, features.
    (
        "SPSA from one side",
        "attacks/gradient_estimation.py",
        "queries = tf.concat([x_adv + shift, x_adv - shift], axis=1)",
        "queries = tf.concat([x_adv + shift, x_adv + 0.0 * shift], axis=1)",
        "tests/attacks/test_attacks_closed_form.py::"
        "test_estimate_on_a_linear_model_is_the_sum_of_its_directions[SPSA]",
    ),
    (
        "SPSA's directions repeat at every step",
        "attacks/gradient_estimation.py",
        "seed = tf.random.fold_in(tf.random.fold_in(seed, _FIRST_DRAW + index), chunk)",
        "seed = tf.random.fold_in(tf.random.fold_in(seed, _FIRST_DRAW), chunk)",
        "tests/attacks/test_attacks_closed_form.py::"
        "test_estimate_on_a_linear_model_is_the_sum_of_its_directions[SPSA]",
    ),
    (
        "SPSA's sum not divided by sigma",
        "attacks/gradient_estimation.py",
        "return total / (2.0 * self.sigma * ",
        "return total / (2.0 * ",
        "tests/attacks/test_attacks_closed_form.py::"
        "test_estimate_on_a_linear_model_is_the_sum_of_its_directions[NES]",
    ),
    (
        "multi-targeted takes the least likely classes first",
        "attacks/multi_targeted.py",
        "targets = other_classes(victim.logits(images), labels, self.num_targets)",
        "targets = other_classes(-victim.logits(images), labels, self.num_targets)",
        "tests/attacks/test_attacks_closed_form.py::test_the_likeliest_target_comes_first",
    ),
    (
        "Square accepts what is worse",
        "attacks/square.py",
        "better = loss < state.loss",
        "better = loss > state.loss",
        "tests/attacks/test_attack_references.py::test_square_query_by_query[linf-0.1-10]",
    ),
    (
        "Square's windows halve one query early",
        "attacks/square.py",
        "halved = np.sum(queries[:, np.newaxis] > np.array(HALVINGS), axis=1)",
        "halved = np.sum(queries[:, np.newaxis] >= np.array(HALVINGS), axis=1)",
        "tests/attacks/test_attack_references.py::test_the_windows_of_square_shrink_as_published",
    ),
    (
        "Square's windows shrink by sides, not areas",
        "attacks/square.py",
        "return self.initial_fraction / 2.0**halved * height * width",
        "return self.initial_fraction / 4.0**halved * height * width",
        "tests/attacks/test_attack_references.py::test_the_windows_of_square_shrink_as_published",
    ),
    (
        "Square changes its windows by epsilon, not by two",
        "attacks/square.py",
        "step = columns[:, :, tf.newaxis] * (2.0 * self.threat.epsilon * signs)[:, tf.newaxis]",
        "step = columns[:, :, tf.newaxis] * (self.threat.epsilon * signs)[:, tf.newaxis]",
        "tests/attacks/test_attack_references.py::test_square_query_by_query[linf-0.1-10]",
    ),
    (
        "feature attack flees from its target",
        "attacks/feature_attack.py",
        "step = -self.step_size * self.threat.steepest_step(gradient)",
        "step = self.step_size * self.threat.steepest_step(gradient)",
        "tests/attacks/test_attacks_closed_form.py::test_the_feature_attack_approaches_its_target",
    ),
    (
        "Square's l2 window forgets the mass it replaces",
        "attacks/square.py",
        "mass = self._power(old, [1, 2]) + self._power(taken, [1, 2])",
        "mass = self._power(taken, [1, 2])",
        "tests/attacks/test_attack_references.py::test_square_query_by_query[l2-0.4-11]",
    ),
]
