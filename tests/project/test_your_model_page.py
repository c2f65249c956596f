"""docs/your_model.md names the flags that say what a model returns and takes."""

import pytest
from documentation import ROOT
from programs import loaded

PAGE = (ROOT / "docs" / "your_model.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["outputs", "pixels", "bounds"])
def test_the_flags_that_the_page_names_exist(flag):
    with loaded("evaluate"):
        from absl import flags

        assert f"--{flag}" in PAGE and flag in flags.FLAGS
