"""How far an evaluation has come, and how long it will take by what its batches took so far.

The compiled loops of attacks count their passes, so that progress moves within a batch, too. Three
things are measured for each attack, and for each part of an ensemble. They are the share of its
examples that hold out, the passes of an example, and the seconds of a pass. What is left follows
from them. An example that has not been attacked yet is expected to hold out, and to take all its
passes.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from he_keras.attacks import Attack
from he_keras.attacks.framework.ensemble import parts
from he_keras.attacks.framework.pass_counter import COUNTER, Passes
from he_keras.status_line import StatusLine, Ticker

#: So many seconds of passes tell how long one takes.
_FEWEST_SECONDS = 0.5
#: A wait for the next pass that is so many times as long as the others was a compilation.
_STALL = 10.0
#: The bar is full when the work is done, and not before.
_NOT_YET_DONE = 0.99


@dataclasses.dataclass
class StageCost:
    """What the batches of one attack took so far, or of one part of an ensemble.

    Attributes:
        name: for the console.
        most: passes of an example that holds out.
        uses_gradient: whether some of the passes are gradients, which take longer.
        entered: examples it was run on.
        held: how many of them it left unbroken.
        measured: how many of them were attacked here, and not read from the record.
        passes: of those.
        seconds: of those, without compilation.
        compiling: seconds until the first pass; None before that.
    """

    name: str
    most: int
    uses_gradient: bool
    entered: int = 0
    held: int = 0
    measured: int = 0
    passes: float = 0.0
    seconds: float = 0.0
    compiling: float | None = None


class Batch(NamedTuple):
    """The batch that is attacked now.

    Attributes:
        stage: number of the attack or part, counted over all attacks.
        rows: how many examples it has.
        calls: how often an example that holds out passes the network, at most.
        began: when.
        before: what was counted before it.
    """

    stage: int
    rows: int
    calls: float
    began: float
    before: Passes


class Work(NamedTuple):
    """Examples that have yet to enter a stage; `follows` says which share of others will.

    Attributes:
        stage: number of the stage.
        examples: how many enter it, if all hold out until then.
        follows: numbers of the stages that they have to survive before.
    """

    stage: int
    examples: float
    follows: tuple[int, ...] = ()


class Forecast:
    """Expected passes and seconds of what is left.

    Args:
        stages: one for each attack, or each part of an ensemble, in order.
        counted: returns what was counted so far.
        clock: seconds.
    """

    def __init__(
        self,
        stages: Sequence[StageCost],
        counted: Callable[[], Passes] = COUNTER.passes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stages = stages
        self._counted, self._clock = counted, clock
        self._batch: Batch | None = None
        self._last = Passes(0, 0)
        self._at_work = 0.0
        self._first_pass = self._last_pass = 0.0
        self._waits: list[float] = []

    def begin(self, stage: int, rows: int, batch_size: int) -> None:
        """Notes that a batch begins.

        Args:
            stage: number of the stage.
            rows: how many examples are attacked.
            batch_size: examples per compiled call.
        """
        calls = self.stages[stage].most * -(-rows // batch_size)
        self._last = self._counted()
        self._at_work, self._first_pass = float(rows), 0.0
        self._last_pass, self._waits = self._clock(), []
        self._batch = Batch(stage, rows, calls, self._clock(), self._last)

    def look(self) -> None:
        """Reads the counter; called now and then while a batch runs."""
        batch, now = self._batch, self._counted()
        if batch is None or now.batches == self._last.batches:
            return
        if self._first_pass:
            self._waits.append(self._clock() - self._last_pass)
        self._last_pass = self._clock()
        self._first_pass = self._first_pass or self._last_pass
        self._at_work = (now.images - self._last.images) / (now.batches - self._last.batches)
        self._last = now

    def end(self, num_held: int, passes: float = 0.0, is_recorded: bool = False) -> None:
        """Notes that the batch has ended.

        Args:
            num_held: how many of its examples hold out.
            passes: what its attack counted itself, for attacks whose loops are not watched.
            is_recorded: it was read from the record, and took no time.
        """
        batch = self._batch
        if batch is None:
            return
        stage = self.stages[batch.stage]
        stage.entered += batch.rows
        stage.held += num_held
        if not is_recorded:
            counted = self._counted().images - batch.before.images
            compiling = self._first_pass - batch.began if self._first_pass else 0.0
            compiling += self._stall()
            # Only the first batch of a stage waits for its compilation.
            compiling = compiling if stage.compiling is None else 0.0
            stage.compiling = compiling if stage.compiling is None else stage.compiling
            stage.measured += batch.rows
            stage.passes += counted or passes
            stage.seconds += self._clock() - batch.began - compiling
        self._batch = None

    @property
    def rows(self) -> int:
        """Examples of the batch; 0 between two batches."""
        return self._batch.rows if self._batch else 0

    @property
    def at_work(self) -> int | None:
        """How many examples of the batch are still attacked; None before the first pass."""
        if self._batch is None or not self._first_pass:
            return None
        return min(round(self._at_work), self._batch.rows)

    def _now(self) -> tuple[float, float]:
        """Passes of the batch so far, and those that its examples at work have yet to make."""
        batch = self._batch
        if batch is None:
            return 0.0, 0.0
        done = self._last.images - batch.before.images
        # Some attacks pass several points of each example at once.
        calls = batch.calls * batch.rows / max(batch.rows, self._at_work)
        left = max(calls - (self._last.batches - batch.before.batches), 0.0) * self._at_work
        return done, left

    def share_held(self, number: int) -> float:
        """Returns which share of the examples of a stage is expected to hold out."""
        stage, batch = self.stages[number], self._batch
        entered, held = stage.entered, float(stage.held)
        if batch is not None and batch.stage == number:
            entered, held = entered + batch.rows, held + min(self._at_work, batch.rows)
        return held / entered if entered else 1.0

    def passes_per_example(self, number: int) -> float:
        """Returns how many passes an example of a stage is expected to take."""
        stage, batch = self.stages[number], self._batch
        rows, passes = stage.measured, stage.passes
        if batch is not None and batch.stage == number:
            rows, passes = rows + batch.rows, passes + sum(self._now())
        return passes / rows if rows else float(stage.most)

    def seconds_per_pass(self, number: int) -> float | None:
        """Returns what a pass of a stage takes; None if no batch of any has told yet.

        A stage that has not run yet is expected to be like those that also use gradients, or none.
        """
        kind = self.stages[number].uses_gradient
        alike = [
            each for each in range(len(self.stages)) if self.stages[each].uses_gradient == kind
        ]
        for numbers in ([number], alike, range(len(self.stages))):
            times = [self._time(each) for each in numbers]
            seconds, passes = (sum(column) for column in zip(*times, strict=True))
            if seconds >= _FEWEST_SECONDS:
                return seconds / passes
        return None

    def _time(self, number: int) -> tuple[float, float]:
        stage, batch = self.stages[number], self._batch
        if batch is None or batch.stage != number or not self._first_pass:
            return stage.seconds, stage.passes
        done = stage.passes + self._now()[0]
        if stage.compiling is not None:
            return stage.seconds + self._last_pass - batch.began, done
        if len(self._waits) < 2:
            # What ends the first wait may be a compilation.
            return 0.0, 0.0
        return self._last_pass - self._first_pass - self._stall(), done

    def _stall(self) -> float:
        """The longest wait of the batch, if it was for a compilation.

        Attacks score their images before their loop is compiled, so the first pass comes too early.
        """
        if len(self._waits) < 2:
            return 0.0
        longest = max(self._waits)
        usual = (sum(self._waits) - longest) / (len(self._waits) - 1)
        return longest if longest > _STALL * usual else 0.0

    def seconds_left(self, work: Sequence[Work]) -> float | None:
        """Returns how long the batch and the work after it will take; None if nobody knows yet."""
        batch, total = self._batch, 0.0
        if batch is not None:
            per_pass = self.seconds_per_pass(batch.stage)
            if per_pass is None:
                return None
            total += self._now()[1] * per_pass
        for stage, examples, follows in work:
            per_pass = self.seconds_per_pass(stage)
            if per_pass is None:
                return None
            share = float(np.prod([self.share_held(each) for each in follows]))
            total += examples * share * self.passes_per_example(stage) * per_pass
        waits = [each.compiling for each in self.stages if each.compiling is not None]
        to_come = {each.stage for each in work if self.stages[each.stage].compiling is None}
        to_come -= {batch.stage} if batch is not None and self._first_pass else set()
        return total + len(to_come) * float(np.mean(waits or [0.0]))


def stages_of(attacks: Sequence[Attack], num_classes: int) -> list[StageCost]:
    """Returns the stages of attacks, none of which has run."""
    found = []
    for attack in attacks:
        for number, part in enumerate(parts(attack), 1):
            count = len(parts(attack))
            is_part = part is not attack
            name = f"{attack.name}, {part.name} ({number} of {count})" if is_part else attack.name
            found.append(StageCost(name, part.most_passes(num_classes), part.uses_gradient))
    return found


class Progress:
    """Shows what runs, how many examples are still at work, the worst case so far, the time left.

    Args:
        name: what the console calls this work.
        attacks: the attacks, in order.
        mode: of the evaluation.
        num_classes: the model's number of classes.
        num_correct: how many examples are classified correctly, in all blocks together.
        show: False shows nothing.
    """

    def __init__(
        self,
        name: str,
        attacks: Sequence[Attack],
        mode: str,
        num_classes: int,
        num_correct: int,
        show: bool,
    ) -> None:
        self._show, self._mode = show, mode
        self._stages = stages_of(attacks, num_classes)
        self._forecast = Forecast(self._stages)
        sizes = np.cumsum([0] + [len(parts(attack)) for attack in attacks])
        self._numbers = [range(*ends) for ends in itertools.pairwise(sizes)]
        self._later, self._block = float(num_correct), 0.0
        self._attack = self._stage = self._rows = self._begun = self._batches = self._size = 0
        self._finished = self._held = 0
        self._robust = ""
        self._lock = threading.Lock()
        self._line = StatusLine(name, show)
        self._ticker = Ticker(self._tick, show)

    def __enter__(self) -> "Progress":
        self._ticker.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._ticker.__exit__(*error)
        if error[0] is None:
            self._line.update(1.0, self._robust)
        self._line.close()

    def block_begins(self, num_correct: int) -> None:
        """Notes a block with so many examples that are right."""
        with self._lock:
            self._later, self._block = max(self._later - num_correct, 0.0), float(num_correct)

    def stage_begins(self, attack: int, part: int, rows: int) -> None:
        """Notes that an attack, or a part of it, begins on so many examples of the block."""
        with self._lock:
            self._attack, self._stage = attack, self._numbers[attack][part]
            self._rows, self._begun, self._batches, self._size = rows, 0, 0, 0

    def batch_begins(self, rows: int, batch_size: int) -> None:
        """Notes that a batch of the stage begins."""
        with self._lock:
            self._begun, self._batches = self._begun + rows, self._batches + 1
            self._size = max(self._size, rows)
            self._forecast.begin(self._stage, rows, batch_size)
        self._tick()

    def batch_done(self, num_held: int, passes: float, is_recorded: bool, left: int, size) -> None:
        """Notes what a batch found.

        Args:
            num_held: how many of its examples hold out.
            passes: what the attack counted.
            is_recorded: the batch was read from the record.
            left: examples of the block that nothing has broken so far.
            size: examples of the block.
        """
        with self._lock:
            self._forecast.end(num_held, passes, is_recorded)
            share = (self._held + left) / (self._finished + size)
            self._robust = f"robust {share:.2%}"
        self._tick()

    def block_done(self, unbroken: np.ndarray) -> None:
        """Adds a block to those that are done."""
        self._finished += len(unbroken)
        self._held += int(unbroken.sum())

    def _tick(self) -> None:
        if not self._show:
            return
        with self._lock:
            self._forecast.look()
            left = self._forecast.seconds_left([*self._work()])
            gone = self._line.seconds
            share = 0.0 if left is None else gone / max(gone + left, 1e-9)
            self._line.update(min(share, _NOT_YET_DONE), self._text(), left)

    def _text(self) -> str:
        stage, at_work = self._stages[self._stage], self._forecast.at_work
        batch = f"batch {self._batches} of {-(-self._rows // max(self._size, 1))}"
        doing = f"{at_work} of {self._forecast.rows} at work" if at_work is not None else ""
        if stage.compiling is None and not doing:
            doing = "compiling"
        return ", ".join(filter(None, (stage.name, batch, doing, self._robust)))

    def _work(self) -> Iterator[Work]:
        """What is left after the batch that runs."""
        yield Work(self._stage, self._rows - self._begun)
        follows: tuple[int, ...] = (self._stage,)
        for stage in self._numbers[self._attack]:
            if stage > self._stage:
                yield Work(stage, self._rows, follows)
                follows += (stage,)
        is_shrinking = self._mode == "survivors"
        entering = self._rows if is_shrinking else self._block
        yield from self._of_attacks(self._attack + 1, entering, follows if is_shrinking else ())
        yield from self._of_attacks(0, self._later, ())

    def _of_attacks(self, first: int, examples: float, follows: tuple) -> Iterator[Work]:
        """What so many examples have to do from an attack on."""
        for numbers in self._numbers[first:]:
            inner: tuple[int, ...] = ()
            for stage in numbers:
                yield Work(stage, examples, (*follows, *inner))
                inner += (stage,)
            follows = (*follows, *inner) if self._mode == "survivors" else ()
