"""Faults of attacks by projected gradients: name, file, old and new text, test."""

FAULTS = [
    # Projected gradient and what attacks share.
    (
        "PGD descends",
        "attacks/projected_gradient.py",
        "moved = threat.project(state.x_adv + step, images)",
        "moved = threat.project(state.x_adv - step, images)",
        "tests/attacks/test_attacks_linear.py::test_pgd[1-linf]",
    ),
    (
        "PGD projects only at the end",
        "attacks/projected_gradient.py",
        "moved = threat.project(state.x_adv + step, images)",
        "moved = state.x_adv + step",
        "tests/attacks/test_attacks_linear.py::test_pgd[6-l2]",
    ),
    (
        "PGD's default step too short",
        "attacks/projected_gradient.py",
        "self.step_size = 2.5 * threat.epsilon / num_steps",
        "self.step_size = threat.epsilon / num_steps",
        "tests/attacks/test_attacks_linear.py::test_default_step_is_madrys_rule",
    ),
    (
        "MIM without momentum",
        "attacks/projected_gradient.py",
        "direction = self.decay * state.velocity + _divided_by_mean_size(gradient)",
        "direction = _divided_by_mean_size(gradient)",
        "tests/attacks/test_attacks_linear.py::test_momentum_worked_out_by_hand",
    ),
    (
        "MIM without normalised gradients",
        "attacks/projected_gradient.py",
        "direction = self.decay * state.velocity + _divided_by_mean_size(gradient)",
        "direction = self.decay * state.velocity + gradient",
        "tests/attacks/test_attacks_linear.py::test_mim[l2]",
    ),
    (
        "PGD keeps the weakest iterate",
        "attacks/framework/result.py",
        "is_better = tf.where(tf.equal(self.broken, broken), strength > self.strength, broken)",
        "is_better = tf.where(tf.equal(self.broken, broken), strength < self.strength, broken)",
        "tests/attacks/test_attack_contract.py::"
        "test_keep_last_returns_the_last_iterate_and_best_the_strongest",
    ),
    (
        "adaptive attack adds the margin",
        "attacks/projected_gradient.py",
        "logits -= victim.scale * margin",
        "logits += victim.scale * margin",
        "tests/attacks/test_attack_contract.py::"
        "test_the_adaptive_attack_takes_scale_and_margin_from_the_head",
    ),
    (
        "adaptive attack forgets the scale of the margin",
        "attacks/projected_gradient.py",
        "logits -= victim.scale * margin",
        "logits -= margin",
        "tests/attacks/test_attack_contract.py::"
        "test_the_adaptive_attack_takes_scale_and_margin_from_the_head",
    ),
    (
        "KL attack swaps the predictions",
        "attacks/projected_gradient.py",
        "return losses.kl_divergence(reference, logits)",
        "return losses.kl_divergence(logits, reference)",
        "tests/attacks/test_goldens_attacks.py::test_kl_attack_from_the_released_start",
    ),
    (
        "KL attack compares with the start",
        "attacks/projected_gradient.py",
        'reference = tf.stop_gradient(victim.logits(images)) if self.loss == "kl" else ()',
        'reference = tf.stop_gradient(victim.logits(start)) if self.loss == "kl" else ()',
        "tests/attacks/test_attack_compilation.py::test_kl_compares_with_the_clean_prediction",
    ),
    (
        "released start ten times too wide",
        "threat.py",
        "GAUSSIAN_START = 0.001",
        "GAUSSIAN_START = 0.01",
        "tests/objectives/test_objectives_closed_form.py::"
        "test_crafted_examples_match_the_closed_form[trades-linear]",
    ),
    (
        "NaN counts as robust",
        "attacks/framework/result.py",
        "return has_nan | tf.not_equal(predictions, tf.cast(labels, tf.int32))",
        "return ~has_nan & tf.not_equal(predictions, tf.cast(labels, tf.int32))",
        "tests/attacks/test_attack_models.py::test_nan_is_reported_and_counted_as_broken",
    ),
    (
        "every restart draws the same start",
        "attacks/framework/attack.py",
        "draw = np.full(len(ids), self.seed * _RESTARTS_PER_SEED + restart, np.int64)",
        "draw = np.full(len(ids), self.seed * _RESTARTS_PER_SEED, np.int64)",
        "tests/attacks/test_attack_contract.py::"
        "test_restarts_go_on_with_the_survivors_and_never_get_weaker",
    ),
    (
        "seeds ignore the number of the example",
        "attacks/framework/attack.py",
        "return np.stack([draw, ids], axis=1).astype(np.int32)",
        "return np.stack([draw, 0 * ids], axis=1).astype(np.int32)",
        "tests/attacks/test_attacks_closed_form.py::test_equal_images_have_starts_of_their_own",
    ),
    (
        "restarts lose later successes",
        "attacks/framework/result.py",
        "better = nearer | (broke & ~had_broken)",
        "better = nearer",
        "tests/attacks/test_attack_contract.py::"
        "test_restarts_go_on_with_the_survivors_and_never_get_weaker",
    ),
    (
        "ensemble keeps the largest margin",
        "attacks/framework/result.py",
        "nearer = (broke == had_broken) & (getattr(again, measure) < earlier)",
        "nearer = (broke == had_broken) & (getattr(again, measure) > earlier)",
        "tests/attacks/test_ensembles.py::test_the_smallest_margin_is_kept",
    ),
    (
        "survivors' results go to other rows",
        "attacks/framework/rows.py",
        "lambda old, new: tf.tensor_scatter_nd_update(old, rows, tf.gather(new, unpadded)),",
        "lambda old, new: tf.concat([tf.gather(new, unpadded), old[count:]], axis=0),",
        "tests/attacks/test_attacks_closed_form.py::test_an_example_that_has_ended_stays_as_it_is",
    ),
    (
        "finished examples move on with their batch",
        "attacks/framework/rows.py",
        "return select_rows(is_active(state), step(index, state, inputs), state)",
        "return step(index, state, inputs)",
        "tests/attacks/test_attacks_closed_form.py::test_an_example_that_has_ended_stays_as_it_is",
    ),
    (
        "gradients of a random model are not averaged",
        "attacks/framework/gradients.py",
        "return sample + 1, logits, loss, total + gradient",
        "return sample + 1, logits, loss, gradient",
        "tests/attacks/test_attacks_closed_form.py::"
        "test_the_gradient_of_a_random_model_is_the_mean_over_its_passes",
    ),
    (
        "success beyond epsilon for minimum-norm attacks",
        "attacks/framework/attack.py",
        "within = crafted.distance <= self.threat.epsilon",
        "within = crafted.distance < np.inf",
        "tests/attacks/test_attacks_closed_form.py::"
        "test_deepfool_goes_beyond_the_boundary_by_its_overshoot[l2]",
    ),
    (
        "Adam without bias correction",
        "attacks/framework/gradients.py",
        "mean = first / (1.0 - tf.pow(tf.constant(_FIRST_DECAY, count.dtype), count))",
        "mean = first",
        "tests/objectives/test_llr.py::test_one_step_of_adam_is_a_step_of_its_learning_rate",
    ),
    (
        "unit scale leaves the head's scale",
        "attacks/framework/victim.py",
        "self._factor = self.scale / head_scale",
        "self._factor = self.scale / self.scale",
        "tests/attacks/test_attack_contract.py::test_logit_scale_of_a_cosine_head_and_of_any_other",
    ),
    # APGD.
    (
        "APGD never halves its step",
        "attacks/apgd.py",
        "return memory, tf.where(reduce, state.step_size / 2.0, state.step_size), reduce",
        "return memory, state.step_size, reduce",
        "tests/attacks/test_attack_references.py::test_apgd_step_by_step[linf-0.75]",
    ),
    (
        "APGD with less of the new step",
        "attacks/apgd.py",
        "_NEW_SHARE = 0.75",
        "_NEW_SHARE = 0.4",
        "tests/attacks/test_attack_references.py::test_apgd_step_by_step[l2-0.75]",
    ),
    (
        "APGD begins with half the step",
        "attacks/apgd.py",
        "first_length = 2.0",
        "first_length = 1.0 + 0.0",
        "tests/attacks/test_attack_references.py::test_apgd_step_by_step[linf-0.75]",
    ),
    (
        "APGD goes on where it is after a halving",
        "attacks/apgd.py",
        "point, gradient = select_rows(restart, state.best.point, (state.point, gradient))",
        "point = state.point",
        "tests/attacks/test_attack_references.py::test_apgd_step_by_step[linf-0.75]",
    ),
    (
        "APGD's checks at a fixed distance",
        "attacks/apgd.py",
        "period = max(period - decrement, shortest)",
        "period = max(period, shortest)",
        "tests/attacks/test_attack_references.py::test_apgd_step_by_step[l2-0.75]",
    ),
    (
        "APGD ignores a best loss that rests",
        "attacks/apgd.py",
        "reduce = is_check & ((rises <= limit) | no_progress)",
        "reduce = is_check & (rises <= limit)",
        "tests/attacks/test_attack_references.py::test_apgd_step_by_step[linf-0.3]",
    ),
    (
        "l1 APGD never shortens its step",
        "attacks/apgd.py",
        "shorter = tf.maximum(state.step_size / _STEP_DIVISOR, largest / _LARGEST_DIVISOR)",
        "shorter = state.step_size",
        "tests/attacks/test_attack_references.py::test_apgd_step_by_step[l1-0]",
    ),
    (
        "targeted APGD starts with the predicted class",
        "attacks/apgd_targeted.py",
        "return logits, other_classes(logits, labels, self.num_targets), 0",
        "return logits, tf.math.top_k(logits, k=self.num_targets).indices, 0",
        "tests/attacks/test_attacks_closed_form.py::"
        "test_targeted_apgd_begins_with_the_likeliest_wrong_class",
    ),
    (
        "order by distance forgets the gradients",
        "attacks/framework/boundary.py",
        "distance = _boundary(tape, logits, points, labels, others, norm).distance",
        "distance = -_boundary(tape, logits, points, labels, others, norm).gap",
        "tests/attacks/test_fast.py::"
        "test_candidates_stand_in_the_order_of_their_linear_distance[10-linf]",
    ),
    (
        "order by distance begins with the farthest class",
        "attacks/framework/boundary.py",
        "order = tf.argsort(distances, axis=1, stable=True)",
        "order = tf.argsort(-distances, axis=1, stable=True)",
        "tests/attacks/test_fast.py::"
        "test_candidates_stand_in_the_order_of_their_linear_distance[10-linf]",
    ),
    (
        "order by distance in the primal norm",
        "attacks/framework/boundary.py",
        "steepness = tf.reshape(length(gradient, DUAL[norm]), [-1])",
        "steepness = tf.reshape(length(gradient, norm), [-1])",
        "tests/attacks/test_fast.py::"
        "test_candidates_stand_in_the_order_of_their_linear_distance[10-linf]",
    ),
    (
        "fast goes towards the likeliest classes",
        "attacks/fast.py",
        'target_order="distance",',
        'target_order="logit",',
        "tests/attacks/test_fast.py::test_fast_is_at_most_an_eighth_of_autoattack[10-linf]",
    ),
    (
        "fast-first stops after what comes first",
        "attacks/autoattack.py",
        "super().__init__(threat, [*first, *getattr(build, version)()], name, **kwargs)",
        "super().__init__(threat, [*(first or getattr(build, version)())], name, **kwargs)",
        "tests/attacks/test_fast.py::test_fast_first_runs_every_part_with_its_own_settings[linf]",
    ),
    (
        "fast-first draws other numbers",
        "attacks/autoattack.py",
        "build = _Components(threat, num_steps, num_queries, shared)",
        'build = _Components(threat, num_steps, num_queries, {**shared, "seed": len(first)})',
        "tests/attacks/test_fast.py::test_fast_first_runs_every_part_with_its_own_settings[linf]",
    ),
    (
        "l2 APGD starts inside the ball",
        "attacks/apgd.py",
        "on_sphere = tf.math.divide_no_nan(noise, length(noise, self.threat.norm))",
        "on_sphere = tf.math.divide_no_nan(noise, 2.0 * length(noise, self.threat.norm))",
        "tests/attacks/test_attacks_closed_form.py::test_starts_of_apgd_lie_on_the_sphere",
    ),
    (
        "APGD's targets share one start",
        "balls.py",
        "return draw(shape, tf.random.fold_in(seed, number), dtype)",
        "return draw(shape, tf.random.fold_in(seed, 0 * number), dtype)",
        "tests/attacks/test_attacks_closed_form.py::test_starts_of_apgd_lie_on_the_sphere",
    ),
]
