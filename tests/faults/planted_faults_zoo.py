"""Faults of public checkpoints, in and out: as the list of the attacks."""

_LOGITS = "tests/zoo/test_checkpoint_logits.py"
FAULTS = [
    (
        "kernels imported with rows and columns swapped",
        "zoo/contents.py",
        "return tensor.transpose(2, 3, 1, 0)",
        "return tensor.transpose(3, 2, 1, 0)",
        f"{_LOGITS}::test_logits_are_those_of_the_published_code[at_he_wrn_10_1]",
    ),
    (
        "JAX averages without their correction",
        "zoo/contents.py",
        'values["average"]',
        'values["hidden"]',
        f"{_LOGITS}::test_jax_parameters_give_the_logits_of_the_same_network[dict]",
    ),
    (
        "mean and deviation in the file go unused",
        "zoo/contents.py",
        "return mean, std",
        "return recipe.statistics or (mean, std)",
        f"{_LOGITS}::test_mean_and_deviation_in_the_file_count_more_than_those_of_the_recipe",
    ),
    (
        "the best weights in place of the last",
        "zoo/recipes/robustbench_preact.py",
        'containers=("state_dict", "last"),',
        'containers=("state_dict", "best"),',
        f"{_LOGITS}::test_last_weights_are_taken_and_not_the_best",
    ),
    (
        "an imported HE head ignores its scale",
        "zoo/loading.py",
        "scales = scale, entry and entry.scale, _SCALE",
        "scales = entry and entry.scale, _SCALE",
        f"{_LOGITS}::test_he_head_is_scaled_as_asked",
    ),
    (
        "a file of another size passes for the published one",
        "zoo/loading.py",
        "if found != expected:",
        "if found[1:] != expected[1:]:",
        "tests/zoo/test_recipes.py::test_file_of_another_size_is_not_the_entry",
    ),
    (
        "a model that is too accurate passes the check",
        "zoo/clean_check.py",
        "chance_of_at_least(self.num_correct, self.num_examples, share) >= _LEVEL",
        "chance_of_at_least(self.num_correct, self.num_examples, share) >= 0",
        "tests/zoo/test_clean_check.py::test_both_sides_of_the_binomial_distribution[200-False]",
    ),
    (
        "a download goes on one byte late",
        "zoo/downloads.py",
        'f"bytes={have}-")',
        'f"bytes={have + 1}-")',
        "tests/zoo/test_downloads.py::test_download_goes_on_where_it_broke_off",
    ),
    (
        "mean and deviation exchanged in a file for PyTorch",
        "zoo/layouts.py",
        "zip(_BUFFERS, (mean, std), strict=True)",
        "zip(_BUFFERS, (std, mean), strict=True)",
        "tests/zoo/test_layouts.py::test_round_trip_is_bit_identical[at_he_wrn_10_1]",
    ),
    (
        "a submission claims the figures of scaled logits",
        "export/robustbench.py",
        'kind = "cosines" if is_cosine and scale == _COSINES else "logits"',
        'kind = "cosines" if is_cosine else "logits"',
        "tests/export/test_export_robustbench.py::test_without_a_report_the_figures_are_empty",
    ),
]
