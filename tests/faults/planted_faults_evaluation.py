"""Faults of evaluation, export and analysis: name, file, old and new text, test."""

FAULTS = [
    # Corruption benchmark.
    (
        "extra corruptions enter the mCA",
        "evaluation/corruption_benchmark.py",
        "return self._mean_over(corruption_set.CORRUPTIONS)",
        "return self._mean_over(tuple(self.accuracy))",
        "tests/evaluation/test_corruption_benchmark.py::test_an_added_corruption_is_evaluated_but_in_no_mean",
    ),
    (
        "mCE of accuracies instead of errors",
        "evaluation/corruption_benchmark.py",
        "ratios = [(1.0 - float(np.mean(self.accuracy[name]))) / baseline[name] for name in names]",
        "ratios = [float(np.mean(self.accuracy[name])) / baseline[name] for name in names]",
        "tests/evaluation/test_corruption_benchmark.py::test_mean_corruption_error",
    ),
    (
        "mCE not relative to the baseline",
        "evaluation/corruption_benchmark.py",
        "ratios = [(1.0 - float(np.mean(self.accuracy[name]))) / baseline[name] for name in names]",
        "ratios = [1.0 - float(np.mean(self.accuracy[name])) for name in names]",
        "tests/evaluation/test_corruption_benchmark.py::test_mean_corruption_error",
    ),
    # The evaluation and its statistics.
    (
        "what remains: broken by the last attack only",
        "evaluation/run/attack_runs.py",
        "unbroken &= correct",
        "unbroken = correct",
        "tests/evaluation/test_evaluation_closed_form.py::"
        "test_attacks_that_break_different_examples_add_up[individual]",
    ),
    (
        "worst case forgets the attacks before",
        "evaluation/run/attack_runs.py",
        "self.unbroken[block.positions] &= alive",
        "self.unbroken[block.positions] = alive",
        "tests/evaluation/test_evaluation_closed_form.py::"
        "test_attacks_that_break_different_examples_add_up[individual]",
    ),
    (
        "survivors are attacked as all are",
        "evaluation/run/attack_runs.py",
        'todo = (self.unbroken if self.mode == "survivors" else self.clean)[block.positions]',
        "todo = self.clean[block.positions]",
        "tests/evaluation/test_evaluation_closed_form.py::"
        "test_attacks_that_break_different_examples_add_up[survivors]",
    ),
    (
        "mistakes on clean images count as robust",
        "evaluation/run/attack_runs.py",
        "self.clean = ~clean.scored.wrong",
        "self.clean = clean.scored.wrong | True",
        "tests/evaluation/test_evaluation_closed_form.py::"
        "test_attacks_that_break_different_examples_add_up[survivors]",
    ),
    (
        "successes count without being scored again",
        "evaluation/run/attack_runs.py",
        "broken[found], margin[found] = scored.wrong, scored.margin",
        "margin[found] = scored.margin",
        "tests/evaluation/test_evaluation_scrutiny.py::test_successes_that_do_not_repeat_are_not_counted",
    ),
    (
        "the exact interval in place of Wilson's",
        "evaluation/statistics.py",
        'proportion_ci(0.95, method="wilson")',
        'proportion_ci(0.95, method="exact")',
        "tests/evaluation/test_evaluation_closed_form.py::test_the_interval_of_eight_in_ten",
    ),
    (
        "intervals of 90 percent",
        "evaluation/statistics.py",
        'proportion_ci(0.95, method="wilson")',
        'proportion_ci(0.90, method="wilson")',
        "tests/evaluation/test_evaluation_closed_form.py::test_the_interval_of_eight_in_ten",
    ),
    (
        "paired test of one side",
        "evaluation/statistics.py",
        "stats.binomtest(only_first, disagreements).pvalue",
        'stats.binomtest(only_first, disagreements, alternative="less").pvalue',
        "tests/evaluation/test_comparison.py::test_p_value_is_that_of_the_binomial_test",
    ),
    (
        "paired test counts what both hold",
        "evaluation/comparison.py",
        "only_first = np.flatnonzero(holds[0] & ~holds[1])",
        "only_first = np.flatnonzero(holds[0])",
        "tests/evaluation/test_comparison.py::test_counts_and_positions_of_every_criterion",
    ),
    (
        "worst case of a comparison counts clean mistakes",
        "evaluation/comparison.py",
        'WORST_CASE: arrays["broken_by"] == -1}',
        'WORST_CASE: arrays["broken_by"] < 0}',
        "tests/evaluation/test_comparison.py::test_counts_and_positions_of_every_criterion",
    ),
    (
        "direction check takes every gradient for positive",
        "evaluation/checks/gradients.py",
        "expected = np.sum((moved - images) * slope.gradient",
        "expected = np.sum((moved - images) * np.abs(slope.gradient)",
        "tests/evaluation/test_preflight.py::test_no_check_fires_on_an_honest_model[honest-0]",
    ),
    (
        "repeatability check with its threshold swapped",
        "evaluation/checks/answers.py",
        "if change <= ",
        "if change >= ",
        "tests/evaluation/test_preflight.py::test_the_checks_fire_on_a_broken_model[noise_layer]",
    ),
    (
        "zero gradients go unseen",
        "evaluation/checks/gradients.py",
        "_per_example(each.gradient == 0.0)",
        "_per_example(each.gradient == 1.0)",
        "tests/evaluation/test_preflight.py::test_the_checks_fire_on_a_broken_model[saturated_quantiser]",
    ),
    (
        "transfer to the source instead of the target",
        "evaluation/transfer_matrix.py",
        "num_correct[target] += int((~scorer(result.x_adv, block.labels).wrong).sum())",
        "num_correct[target] += int((~scorer(block.images, block.labels).wrong).sum())",
        "tests/evaluation/test_transfer_matrix.py::test_two_linear_models_as_by_hand",
    ),
    # Calibration and export.
    (
        "temperature multiplies the logits",
        "export/calibration.py",
        "return negative_log_likelihood(logits / np.exp(log_temperature), labels)",
        "return negative_log_likelihood(logits * np.exp(log_temperature), labels)",
        "tests/export/test_export_card.py::test_temperature_undoes_a_factor",
    ),
    (
        "calibration errors cancel between bins",
        "export/calibration.py",
        "gaps = [abs(np.sum(confidence[bins == each] - right[bins == each]))",
        "gaps = [np.sum(confidence[bins == each] - right[bins == each])",
        "tests/export/test_export_card.py::test_expected_calibration_error_by_hand",
    ),
    (
        "calibration error of the label's probability",
        "export/calibration.py",
        "confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels",
        "confidence, right = probabilities.min(axis=1), probabilities.argmax(axis=1) == labels",
        "tests/export/test_export_card.py::test_expected_calibration_error_by_hand",
    ),
    (
        "exported probabilities not calibrated",
        "export/served_classifier.py",
        "return tf.nn.softmax(logits / self.temperature)",
        "return tf.nn.softmax(logits)",
        "tests/export/test_export.py::test_top_k_and_temperature",
    ),
    (
        "exported probabilities of cosines without scale",
        "export/served_classifier.py",
        "probabilities = self.probabilities(logits)",
        'probabilities = self.probabilities(cosines.get("cosines", logits))',
        "tests/export/test_export.py::test_top_k_and_temperature",
    ),
    (
        "exported scores unsorted",
        "export/served_classifier.py",
        '"scores": tf.gather(probabilities, order, batch_dims=1),',
        '"scores": probabilities[:, : self.top_k],',
        "tests/export/test_export.py::test_scores_and_labels_are_sorted_by_probability",
    ),
    # Analysis.
    (
        "linearity measured without the tangent",
        "analysis/linearity.py",
        "- tangent.loss - slope)",
        "- tangent.loss)",
        "tests/analysis/test_analysis_linearity.py::test_the_margin_of_a_linear_model_does_not_deviate",
    ),
    (
        "power iteration finds the same eigenvalue again",
        "analysis/hessian.py",
        "vector = vector - (vector @ other) * other",
        "vector = vector - 0.0 * (vector @ other) * other",
        "tests/analysis/test_analysis_hessian.py::test_equal_eigenvalues_are_found_as_often_as_they_occur",
    ),
    (
        "eigenvalues by their size only",
        "analysis/hessian.py",
        "before, value = value, float(vector @ image)",
        "before, value = value, float(np.linalg.norm(image))",
        "tests/analysis/test_analysis_hessian.py::"
        "test_a_quadratic_with_a_negative_eigenvalue_of_largest_size",
    ),
    (
        "binomial tail without its first term",
        "evaluation/statistics.py",
        "stats.binom.sf(count - 1, total, share)",
        "stats.binom.sf(count, total, share)",
        "tests/evaluation/test_significance.py::test_tails_of_the_binomial_distribution",
    ),
    (
        "checks compare net gains",
        "evaluation/statistics.py",
        "self.gains, self.gains + self.losses, 0.5)",
        "self.gains - self.losses, self.gains, 0.5)",
        "tests/evaluation/test_significance.py::test_pairs_are_compared_by_the_exact_sign_test[8-3]",
    ),
    (
        "an old trace is never compared with the model",
        "attacks/framework/attack.py",
        "is_unproven = key == self._compiled_key and found is not self._proven",
        "is_unproven = False",
        "tests/attacks/test_agreement.py::test_callable_that_has_changed_inside_is_compiled_anew[number]",
    ),
    (
        "a folder's recorded answers are not compared",
        "evaluation/run/identity.py",
        "found = answer_differences(stored[name], now)",
        "found = []",
        "tests/evaluation/test_evaluation_identity.py::test_a_model_without_gradient_is_known_by_its_logits",
    ),
    (
        "records of another plan are taken for this one's",
        "evaluation/run/journal.py",
        "if made_with == plan:",
        "if plan:",
        "tests/evaluation/test_evaluation_identity.py::"
        "test_checks_of_another_plan_are_not_taken_for_this_ones",
    ),
    (
        "another function with equal verdicts is verified",
        "evaluation/run/verification.py",
        'others = function_differences(model, settings["model"], folder)',
        "others = []",
        "tests/evaluation/test_evaluation_shards.py::"
        "test_another_function_with_the_same_verdicts_does_not_hold[scale]",
    ),
]
