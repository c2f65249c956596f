"""Faults of objectives and the training step: name, file, old and new text, test."""

FAULTS = [
    # What objectives share.
    (
        "scheduled radius does not reach the attack",
        "objectives/objective.py",
        "threat = with_radius(self.threat, epsilon)",
        "threat = self.threat",
        "tests/schedules/test_epsilon_schedules.py::test_sizes_of_one_step",
    ),
    (
        "steps keep their length while the radius grows",
        "objectives/objective.py",
        "return nominal * self.share",
        "return nominal + 0.0 * self.share",
        "tests/schedules/test_epsilon_schedules.py::test_sizes_of_one_step",
    ),
    (
        "training pass in inference mode",
        "objectives/objective.py",
        "logits = model(x_adv, training=training)",
        "logits = model(x_adv, training=False)",
        "tests/objectives/test_objectives.py::"
        "test_batch_norm_statistics_come_from_the_documented_passes[pgd_at]",
    ),
    (
        "training attack in training mode",
        "objectives/objective.py",
        "victim, sizes = Victim(model), self.sizes_at(step_number)",
        "victim, sizes = Victim(model, training=True), self.sizes_at(step_number)",
        "tests/objectives/test_objectives.py::test_crafting_changes_no_weight_and_no_statistic[pgd_at]",
    ),
    (
        "training loss without the margin",
        "objectives/objective.py",
        "logits = with_margin(model, logits, labels)",
        "logits = tf.identity(logits)",
        "tests/objectives/test_objectives.py::test_margin_acts_in_the_loss_and_not_in_the_attack",
    ),
    (
        "default training step of another paper",
        "objectives/objective.py",
        "step_size=threat.epsilon * 0.007 / 0.031 if step_size is None else step_size,",
        "step_size=threat.epsilon / 4 if step_size is None else step_size,",
        "tests/objectives/test_objectives.py::test_defaults_are_the_released_ones",
    ),
    # TRADES, ALP, MART.
    (
        "TRADES swaps its predictions",
        "objectives/trades.py",
        "divergence = DIVERGENCES[self.divergence](clean_logits, logits)",
        "divergence = DIVERGENCES[self.divergence](logits, clean_logits)",
        "tests/objectives/test_objectives_closed_form.py::"
        "test_weights_after_fit_match_the_closed_form[trades-linear]",
    ),
    (
        "TRADES holds the clean prediction constant",
        "objectives/trades.py",
        "divergence = DIVERGENCES[self.divergence](clean_logits, logits)",
        "divergence = DIVERGENCES[self.divergence](keras.ops.stop_gradient(clean_logits), logits)",
        "tests/objectives/test_goldens_training.py::test_trades_differentiates_through_the_clean_prediction",
    ),
    (
        "TRADES' clean pass leaves no statistics",
        "objectives/trades.py",
        "clean_logits = model(images, training=training)",
        "clean_logits = model(images, training=False)",
        "tests/objectives/test_objectives.py::"
        "test_batch_norm_statistics_come_from_the_documented_passes[trades]",
    ),
    (
        "ALP swaps the weights of its cross-entropies",
        "objectives/alp.py",
        "mixed = self.clean_weight * clean_loss + (1.0 - self.clean_weight) * adversarial_loss",
        "mixed = (1.0 - self.clean_weight) * clean_loss + self.clean_weight * adversarial_loss",
        "tests/objectives/test_objectives_closed_form.py::"
        "test_weights_after_fit_match_the_closed_form[alp squared-l2-he]",
    ),
    (
        "ALP forgets its weight",
        "objectives/alp.py",
        "return TrainingPass(mixed + self.beta * paired, logits, clean_logits)",
        "return TrainingPass(mixed + paired, logits, clean_logits)",
        "tests/objectives/test_objectives_closed_form.py::"
        "test_weights_after_fit_match_the_closed_form[alp-linear]",
    ),
    (
        "ALP pairs scaled logits",
        "objectives/alp.py",
        "difference = unscaled(model, difference)",
        "difference = 1.0 * difference",
        "tests/objectives/test_objectives_closed_form.py::"
        "test_weights_after_fit_match_the_closed_form[alp-he]",
    ),
    (
        "ALP holds the clean logits constant",
        "objectives/alp.py",
        "difference = clean_logits - logits",
        "difference = tf.stop_gradient(clean_logits) - logits",
        "tests/objectives/test_objectives_closed_form.py::"
        "test_weights_after_fit_match_the_closed_form[alp-linear]",
    ),
    (
        "MART weighs what is right",
        "objectives/mart.py",
        "divergence = (1.0 - clean_probability) * losses.kl_divergence(clean_logits, logits)",
        "divergence = clean_probability * losses.kl_divergence(clean_logits, logits)",
        "tests/objectives/test_mart.py::test_divergence_counts_by_how_wrong_the_clean_prediction_is",
    ),
    (
        "MART without the boost of the strongest wrong class",
        "objectives/mart.py",
        "boosted = self.cross_entropy(model, logits, labels) + boost",
        "boosted = self.cross_entropy(model, logits, labels) + 0.0 * boost",
        "tests/objectives/test_mart.py::test_weights_after_fit_match_the_closed_form",
    ),
    # Single steps: FreeAT, FastAT, N-FGSM, FastAdv+.
    (
        "FreeAT begins every replay without noise",
        "objectives/free_at.py",
        "moved = noise + sizes.step_size(self.step_size) * self.threat.steepest_step(gradient)",
        "moved = sizes.step_size(self.step_size) * self.threat.steepest_step(gradient)",
        "tests/objectives/test_objectives_closed_form.py::"
        "test_weights_after_fit_match_the_closed_form[free-at-linear]",
    ),
    (
        "FreeAT's noise leaves the ball",
        "objectives/free_at.py",
        "self.noise.put_first_rows(sizes.threat.project_perturbation(moved))",
        "self.noise.put_first_rows(moved)",
        "tests/objectives/test_objectives.py::test_noise_grows_persists_and_serves_short_batches",
    ),
    (
        "FreeAT moves the noise of saturated pixels",
        "objectives/free_at.py",
        "gradient = tf.where(is_inside, usable(gradient), 0.0)",
        "gradient = usable(gradient)",
        "tests/objectives/test_objectives.py::test_free_at_leaves_the_noise_of_saturated_pixels",
    ),
    (
        "FreeAT replays once too often",
        "objectives/free_at.py",
        "self.num_replays = self.updates_per_batch = num_replays",
        "self.num_replays, self.updates_per_batch = num_replays, num_replays + 1",
        "tests/objectives/test_objectives.py::test_free_at_updates_the_weights_in_every_replay",
    ),
    (
        "FastAT's step of epsilon",
        "objectives/fast_at.py",
        "step_size = 1.25 * threat.epsilon if step_size is None and threat else step_size",
        "step_size = 1.0 * threat.epsilon if step_size is None and threat else step_size",
        "tests/objectives/test_objectives.py::test_defaults_are_the_released_ones",
    ),
    (
        "N-FGSM's noise only as wide as epsilon",
        "objectives/n_fgsm.py",
        "noisy = self.threat.random_start(images, seed, self.noise_ratio * sizes.threat.epsilon)",
        "noisy = self.threat.random_start(images, seed, sizes.threat.epsilon)",
        "tests/objectives/test_n_fgsm.py::test_crafted_examples_match_the_closed_form",
    ),
    (
        "N-FGSM clips to the ball",
        "objectives/n_fgsm.py",
        "return tf.stop_gradient(self.threat.clip_to_bounds(x_adv))",
        "return tf.stop_gradient(self.threat.project(x_adv, images))",
        "tests/objectives/test_n_fgsm.py::test_examples_leave_the_ball_but_not_the_bounds",
    ),
    (
        "recovery of FastAdv+ never ends",
        "objectives/fast_adv_plus.py",
        "count.assign(tf.maximum(count.read_value() - 1, 0))",
        "count.assign(tf.maximum(count.read_value(), 0))",
        "tests/callbacks/test_overfitting_guard.py::"
        "test_a_collapse_starts_pgd_training_for_a_number_of_batches",
    ),
    # Regularisers and wrappers: AWP, LLR, GradAlign, ELLE, RAT.
    (
        "AWP's perturbation not relative to the weights",
        "objectives/awp.py",
        "factor = tf.math.divide_no_nan(tf.norm(weight), tf.norm(direction))",
        "factor = tf.math.reciprocal_no_nan(tf.norm(direction))",
        "tests/objectives/test_awp.py::test_length_and_direction_of_a_perturbation",
    ),
    (
        "AWP perturbs towards a smaller loss",
        "objectives/awp.py",
        "shift = tf.cast(gamma, weight.dtype) * factor * direction",
        "shift = -tf.cast(gamma, weight.dtype) * factor * direction",
        "tests/objectives/test_awp.py::test_length_and_direction_of_a_perturbation",
    ),
    (
        "AWP's perturbation stays in the weights",
        "objectives/awp.py",
        "scope.keep_updates(model)",
        "[each.assign(value) for each, value in zip(variables, values, strict=True)]",
        "tests/objectives/test_awp.py::test_weights_after_fit_match_the_closed_form",
    ),
    (
        "AWP's first pass does the training",
        "objectives/awp.py",
        "tf.convert_to_tensor(variable) + perturbation",
        "tf.convert_to_tensor(variable) + 0.0 * perturbation",
        "tests/objectives/test_awp.py::test_weights_after_fit_match_the_closed_form",
    ),
    (
        "LLR's deviation without the slope",
        "objectives/llr.py",
        "deviation = self.cross_entropy(model, logits, labels) - clean.tangent.loss - slope",
        "deviation = self.cross_entropy(model, logits, labels) - clean.tangent.loss",
        "tests/objectives/test_llr.py::test_loss_and_gradient_of_the_weights_are_those_of_numpy",
    ),
    (
        "LLR's slope may be negative",
        "objectives/llr.py",
        "+ self.slope_weight * tf.abs(slope)",
        "+ self.slope_weight * slope",
        "tests/objectives/test_llr.py::test_loss_and_gradient_of_the_weights_are_those_of_numpy",
    ),
    (
        "LLR's search ignores the sign of the deviation",
        "objectives/local_linearity.py",
        "direction = mask_like(tf.sign(deviation), gradient) * gradient",
        "direction = gradient",
        "tests/objectives/test_llr.py::test_the_search_finds_the_corner_of_largest_deviation",
    ),
    (
        "GradAlign rewards opposite gradients",
        "objectives/grad_align.py",
        "distance = 1.0 - tf.reduce_sum(one * other, axis=-1)",
        "distance = 1.0 + tf.reduce_sum(one * other, axis=-1)",
        "tests/objectives/test_grad_align.py::test_cosine_distance_knows_no_lengths_and_no_direction_of_zero",
    ),
    (
        "GradAlign's noise is the adversary's start",
        "objectives/grad_align.py",
        "noisy = threat.random_start(images, tf.random.fold_in(seed, _STREAM))",
        "noisy = threat.random_start(images, seed)",
        "tests/objectives/test_grad_align.py::test_passes_and_batch_norm_statistics[False]",
    ),
    (
        "ELLE swaps the shares of its ends",
        "objectives/elle.py",
        "return tf.square(loss_between - (1.0 - share) * first_loss - share * second_loss)",
        "return tf.square(loss_between - share * first_loss - (1.0 - share) * second_loss)",
        "tests/objectives/test_elle.py::test_errors_of_a_quadratic_loss",
    ),
    (
        "RAT swaps clean and adversarial statistics",
        "objectives/rat.py",
        "sizes, squares = tf.abs(a) - tf.abs(b), tf.square(a) - tf.square(b)",
        "sizes, squares = tf.abs(b) - tf.abs(a), tf.square(b) - tf.square(a)",
        "tests/objectives/test_rat.py::test_weights_after_fit_match_the_closed_form",
    ),
    (
        "RAT crafts without noise on the weights",
        "objectives/rat.py",
        "noisy.append(value + deviation * noise)",
        "noisy.append(value + 0.0 * noise)",
        "tests/objectives/test_rat_crafting.py::"
        "test_the_noise_is_normal_independent_and_determined_by_the_seed",
    ),
    # The training step.
    (
        "weight decay of regularisers is lost",
        "adversarial_model.py",
        " / global_count + regularization / replicas.count()",
        " / global_count",
        "tests/model/test_adversarial_model.py::test_regularisers_enter_the_gradient",
    ),
    (
        "robust accuracy counts attacks that fix a mistake",
        "adversarial_model.py",
        "self.robust_accuracy_metric.update_state(attacked * right)",
        "self.robust_accuracy_metric.update_state(attacked)",
        "tests/objectives/test_objectives_closed_form.py::test_an_attack_cannot_make_a_mistake_robust",
    ),
    (
        "every step draws the same noise",
        "adversarial_model.py",
        "return tf.stack([self.seed + replicas.number() * _REPLICA_STRIDE, batch])",
        "return tf.stack([self.seed + replicas.number() * _REPLICA_STRIDE, 0 * batch])",
        "tests/model/test_adversarial_model.py::test_two_batches_draw_different_noise",
    ),
    (
        "replicas draw the same noise",
        "adversarial_model.py",
        "self.seed + replicas.number() * _REPLICA_STRIDE",
        "self.seed + replicas.number() * 0",
        "tests/distribution/test_distribution.py::test_every_replica_has_a_seed_of_its_own",
    ),
]
