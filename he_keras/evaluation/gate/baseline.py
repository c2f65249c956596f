"""The evaluation that a gate compares with: read, checked, and its attacks built once more."""

import dataclasses
import pathlib
from collections.abc import Callable

from he_keras.attacks import Attack, get
from he_keras.evaluation.report.report_files import StoredReport, read_report
from he_keras.evaluation.run.examples import PREFIX, DataDigest, Examples
from he_keras.threat import ThreatModel

#: What an evaluation costs at most unless its attacks are asked for by name.
CHEAP = "screen"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """An evaluation to compare with.

    Attributes:
        source: its files.
        prepare: called with its attacks when they are built.
    """

    source: StoredReport
    prepare: Callable[[list[Attack]], object] = lambda attacks: None

    @property
    def folder(self) -> pathlib.Path:
        """Where it lies."""
        return self.source.folder

    @property
    def num_examples(self) -> int:
        """How many examples it has."""
        return self.source.report["num_examples"]

    @property
    def threat(self) -> ThreatModel:
        """Its threat model."""
        return ThreatModel(**self.source.report["threat"])

    @property
    def attack_names(self) -> list[str]:
        """Its attacks."""
        return [row["name"] for row in self.source.report["attacks"]]

    def attacks(self, asked, batch_size: int) -> list[Attack]:
        """Builds its attacks with the settings that it has recorded.

        Weaker attacks would make any model look better than the baseline, so there is no choice.

        Args:
            asked: their names, if the caller has named them; else they must be cheap.
            batch_size: of the new evaluation.
        """
        names = self.attack_names
        if asked is not None and [str(each).lower() for each in asked] != [
            name.lower() for name in names
        ]:
            raise ValueError(
                f"Other attacks than the baseline's; expected {','.join(names)}, as in "
                f"{self.folder}; received {','.join(map(str, asked))}"
            )
        rows = self.source.report["attacks"]
        attacks = [self._attack(row, batch_size) for row in rows]
        cost, cheap = map(self._passes, (attacks, [get(CHEAP, self.threat)]))
        if asked is None and cost > cheap:
            raise ValueError(
                f"The baseline's attacks cost more than {CHEAP}; expected at most {cheap} passes "
                f"an image; received {cost}: allow them by their names, {','.join(names)}, or "
                f"evaluate the baseline with {CHEAP}"
            )
        self.prepare(attacks)
        return attacks

    def _attack(self, row: dict, batch_size: int) -> Attack:
        try:
            kind = type(get(row["name"], self.threat))
            settings = {**row["settings"], "threat": self.threat, "batch_size": batch_size}
            return kind.from_config(settings)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "An attack of the baseline cannot be built again; expected one known by its name "
                f"with its settings; received {row['name']} in {self.folder}: {error}"
            ) from error

    def _passes(self, attacks) -> int:
        return sum(attack.most_passes(self.source.num_classes) for attack in attacks)

    def check_fits(self, threat: ThreatModel, examples: Examples) -> None:
        """Raises a ValueError unless the baseline is of this threat model and of these images."""
        if self.threat != threat:
            raise ValueError(
                f"The baseline has another threat model; expected {threat.text()}; received "
                f"{self.threat.text()} in {self.folder}"
            )
        recorded = str((self.source.report.get("settings") or {}).get("data"))
        if not recorded.startswith(PREFIX):
            raise ValueError(
                "The baseline does not say which images it is about; expected a report of this "
                f"version of he_keras; received {self.folder}: evaluate it again"
            )
        digest, count = DataDigest(), 0
        for images, labels in examples:
            digest.update(images, labels)
            count += len(labels)
        if digest.text() != recorded:
            raise ValueError(
                f"The baseline is of other images; expected these {count} images in this order; "
                f"received {self.num_examples} others in {self.folder}"
            )


def read_baseline(path) -> Baseline:
    """Reads an evaluation.

    Args:
        path: its folder, its report.json, or the run folder that it belongs to.
    """
    folder = pathlib.Path(path)
    if folder.name == "report.json":
        folder = folder.parent
    if not (folder / "report.json").exists() and (folder / "evaluation").is_dir():
        folder = folder / "evaluation"
    return Baseline(read_report(folder, with_gallery=False))
